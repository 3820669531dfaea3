"""How much memory the device has to give: asked of the driver by a process of its own.

Run as `python -m tasks.machine.device_memory DEVICE` it prints the free bytes. Owns the child. Refuses torch in
whoever asks, and a device's memory is asked for only where there may be one.
"""

import subprocess
import sys

from tasks.machine.machine_speed import may_have_cuda

_TIMEOUT_SECONDS = 60.0


def trains_on_cuda(device: str) -> bool:
    """Whether `training.device` means an accelerator here."""
    return device.startswith("cuda") or (device == "auto" and may_have_cuda())


def free_device_bytes(device: str) -> int | None:
    """Return what is free on the CUDA device that `training.device` means; None where that cannot be found out."""
    command = [sys.executable, "-m", "tasks.machine.device_memory", device]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    said = done.stdout.strip()
    return int(said) if said.isdecimal() else None


def main() -> None:
    """Print the free bytes of the device; nothing where it is no CUDA device."""
    import torch

    device = torch.device("cuda" if sys.argv[1] == "auto" else sys.argv[1])
    if torch.cuda.is_available() and device.type == "cuda":
        print(torch.cuda.mem_get_info(device)[0])


if __name__ == "__main__":
    main()
