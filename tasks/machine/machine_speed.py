"""What is known of this machine's arithmetic: measured once in a process of its own, kept in the work folder.

Run as `python -m tasks.machine.machine_speed` it measures and prints. Owns the child, the kept answer and what that
is an answer for. Refuses torch in whoever asks: nobody should wait for it who needs no measurement. What is kept is
only a convenience: a damaged answer is measured anew, a folder that cannot be written costs a measurement a run.
"""

import hashlib
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from model.configuration.network import ModelConfig
from model.configuration.training import TrainingConfig
from model.errors import ModelError
from model.estimates.numerics import (
    MachineSpeed,
    NumericsChoice,
    benefits_from_cpu_bf16,
    choose_numerics,
    has_auto_numerics,
)
from storage.errors import IntegrityError
from storage.stores.document import decode, encode

_PROBE_VERSION = 1
_TIMEOUT_SECONDS = 60.0
_HALF_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "avx10_2", "bf16"})
"""What /proc/cpuinfo calls bf16 products in hardware, the last one on ARM; without any, nothing needs measuring."""
_CPU_LINES = ("model name", "flags", "CPU implementer", "CPU part", "Features")
_CUDA_TRACES = ("/proc/driver/nvidia/gpus", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "CUDA_VISIBLE_DEVICES")


def numerics_here(training: TrainingConfig, model: ModelConfig, folder: Path, *, keep: bool = True) -> NumericsChoice:
    """Return the arithmetic a new run of this configuration trains in on this machine; measures only what decides.

    `folder` is the work folder; nothing is written there unless `keep`.
    """
    if not has_auto_numerics(training):
        return choose_numerics(training, model, MachineSpeed())
    wants_cuda = training.device.startswith("cuda") or (training.device == "auto" and may_have_cuda())
    wants_half = training.precision == "auto" and benefits_from_cpu_bf16(training, model) and may_have_half(cpu_facts())
    needed = wants_cuda or wants_half
    return choose_numerics(training, model, machine_speed(folder, keep=keep) if needed else MachineSpeed())


@contextmanager
def numerics_beside(
    training: TrainingConfig, model: ModelConfig, folder: Path
) -> Iterator[Callable[[], NumericsChoice]]:
    """Find `numerics_here` out while the block does something else; what is yielded waits for it."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="mode") as beside:
        yield beside.submit(numerics_here, training, model, folder).result


def machine_speed(folder: Path, *, keep: bool = True) -> MachineSpeed:
    """Return what is kept of this machine as it is now, else measure it; a measurement that fails promises nothing."""
    path = folder / "machine" / f"{_identity(cpu_facts(), os.environ)}.json"
    with suppress(OSError, IntegrityError, ModelError):
        return decode(path.read_bytes(), MachineSpeed, where=str(path))
    try:
        speed = _measured()
    except (OSError, subprocess.SubprocessError, IntegrityError, ModelError):
        return MachineSpeed()
    if keep:
        _keep(path, speed)
    return speed


def cpu_facts(path: Path = Path("/proc/cpuinfo")) -> Mapping[str, str]:
    """Return what the first core says of itself; where the system has no such file, the platform's name."""
    with suppress(OSError):
        first = path.read_text(errors="replace").partition("\n\n")[0]
        lines = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in lines if name.strip() in _CPU_LINES}
    return {"model name": platform.platform()}


def may_have_half(facts: Mapping[str, str]) -> bool:
    """Whether a CPU that says this of itself could multiply bf16 in hardware; one that says nothing could."""
    flags = facts.get("flags", facts.get("Features"))
    return flags is None or not _HALF_FLAGS.isdisjoint(flags.split())


def may_have_cuda() -> bool:
    """Whether torch could find a CUDA device: a driver has left a trace."""
    return any(os.path.exists(trace) for trace in _CUDA_TRACES)


def _identity(facts: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return a name for all that the answer depends on."""
    settings = [f"{name}={environment.get(name, '')}" for name in _SETTINGS]
    known = [str(_PROBE_VERSION), version("torch"), *map(str, sorted(facts.items())), *settings, *_cuda_names()]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:32]


def _cuda_names() -> list[str]:
    """Return what the drivers' traces say: which cards there are."""
    cards = sorted(Path(_CUDA_TRACES[0]).glob("*/information"))
    return [*filter(os.path.exists, _CUDA_TRACES), *(card.read_text(errors="replace") for card in cards)]


def _measured() -> MachineSpeed:
    command = [sys.executable, "-m", "tasks.machine.machine_speed"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_TIMEOUT_SECONDS)
    return decode(done.stdout, MachineSpeed, where="the machine's measurement")


def _keep(path: Path, speed: MachineSpeed) -> None:
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(encode(speed))
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def main() -> None:
    """Measure this machine and print the answer as JSON."""
    from model.estimates.utilization import measure_machine

    sys.stdout.buffer.write(encode(measure_machine()))


if __name__ == "__main__":
    main()
