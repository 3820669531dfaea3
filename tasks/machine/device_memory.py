"""Free memory of the accelerator, read in a child process so that the caller does not import torch.

`python -m tasks.machine.device_memory DEVICE` prints the free bytes.
"""

import subprocess
import sys

_TIMEOUT_SECONDS = 60.0


def free_device_bytes(device: str) -> int | None:
    """Return the free bytes of the CUDA device that `training.device` names; None if they cannot be read."""
    command = [sys.executable, "-m", "tasks.machine.device_memory", device]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    output = done.stdout.strip()
    return int(output) if output.isdecimal() else None


def main() -> None:
    """Print the free bytes of the device, or nothing if it is not a CUDA device."""
    import torch

    device = torch.device("cuda" if sys.argv[1] == "auto" else sys.argv[1])
    if torch.cuda.is_available() and device.type == "cuda":
        print(torch.cuda.mem_get_info(device)[0])


if __name__ == "__main__":
    main()
