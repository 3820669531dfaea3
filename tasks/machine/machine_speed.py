"""The arithmetic speed of this machine, cached in the work folder, and the free memory of its accelerator.

A child measures, and imports torch.
"""

import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.errors import ModelError
from cairn.model.estimates.numerics import MachineSpeed, NumericsChoice, benefits_from_cpu_bf16, choose_numerics
from cairn.storage.errors import IntegrityError
from cairn.storage.stores import child_process, codec
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import replace_file

_HALF_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "avx10_2", "bf16"})
"""Flags in /proc/cpuinfo for bf16 products in hardware, the last one on ARM; without them nothing is measured."""
_CPU_LINES = ("model name", "flags", "CPU implementer", "CPU part", "Features")
_CUDA_TRACES = ("/proc/driver/nvidia/gpus", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_CARDS = Path(_CUDA_TRACES[0])
_SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "CUDA_VISIBLE_DEVICES")
Ask = Callable[[], MachineSpeed | None]
"""Asks a process that has imported torch already; None if there is none that can answer."""


def numerics_here(
    training: TrainingConfig, model: ModelConfig, folder: Path, *, keep: bool = True, ask: Ask = lambda: None
) -> NumericsChoice:
    """Return the numerics of a new run here; measures only if the choice needs it, and caches in `folder` if `keep`."""
    if "auto" not in (training.precision, training.kernels):
        return choose_numerics(training, model, MachineSpeed())
    # Products in bf16 are made by instructions that are wider than the portable set.
    is_open = training.arithmetic == "native" and training.precision == "auto"
    wants_half = is_open and benefits_from_cpu_bf16(training, model) and may_have_half(cpu_facts())
    needed = wants_half or trains_on_cuda(training.device)
    return choose_numerics(training, model, machine_speed(folder, keep=keep, ask=ask) if needed else MachineSpeed())


@contextmanager
def numerics_beside(
    training: TrainingConfig, model: ModelConfig, folder: Path, ask: Ask = lambda: None
) -> Iterator[Callable[[], NumericsChoice]]:
    """Compute `numerics_here` in a thread while the block runs; the yielded function waits for the result."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="mode") as beside:
        yield beside.submit(numerics_here, training, model, folder, ask=ask).result


def machine_speed(folder: Path, *, keep: bool = True, ask: Ask = lambda: None) -> MachineSpeed:
    """Return the cached speed of this machine, else measure it and cache that if it can; an empty one if it cannot."""
    settings = [f"{name}={os.environ.get(name, '')}" for name in _SETTINGS]
    traces = [*filter(os.path.exists, _CUDA_TRACES), *_card_texts(_CARDS)]
    known = ["1", version("torch"), *map(str, sorted(cpu_facts().items())), *settings, *traces]
    identity = codec.sha256("\n".join(known).encode())[:32]
    path = folder / "machine" / f"{identity}.json"
    with suppress(OSError, IntegrityError, ModelError):
        return codec.decode(path.read_bytes(), MachineSpeed, where=str(path))
    try:
        speed = (None if may_have_cuda() else ask()) or _measure()  # the one asked would keep memory of a GPU
    except (OSError, subprocess.SubprocessError, IntegrityError, ModelError):
        return MachineSpeed()
    if keep:
        replace_file(path, codec.encode(speed))
    return speed


def free_device_bytes(device: str) -> int | None:
    """Return the free bytes of the CUDA device that `training.device` names; None if they cannot be read."""
    try:
        output = child_process.call_child(__name__, device).strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return int(output) if output.isdigit() else None


def cpu_facts(path: Path = Path("/proc/cpuinfo"), names: Sequence[str] = _CPU_LINES) -> Mapping[str, str]:
    """Return the first core's lines of /proc/cpuinfo, or the platform's name where there is no such file."""
    with suppress(OSError):
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        lines = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in lines if name.strip() in names}
    return {"model name": platform.platform()}


def device_name(device: str, *, cards: Path = _CARDS) -> str:
    """Return the name that the CPU, or the driver of an accelerator, gives a device; empty if it gives none."""
    if not device.startswith("cuda"):
        facts = cpu_facts(names=(*_CPU_LINES, "cpu family", "model"))
        name, numbers = facts.get("model name", facts.get("CPU part", "")), ("cpu family", "model")
        generation = ", ".join(f"{number} {facts[number]}" for number in numbers if number in facts)
        return f"{name} ({generation})" if generation else name
    lines = [line for text in _card_texts(cards)[:1] for line in text.splitlines()]
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "")


def may_have_half(facts: Mapping[str, str]) -> bool:
    """Whether a CPU with these facts may multiply bf16 in hardware; without flags it may."""
    flags = facts.get("flags", facts.get("Features"))
    return flags is None or not _HALF_FLAGS.isdisjoint(flags.split())


def may_have_cuda() -> bool:
    """Whether a driver's files suggest that torch may find a CUDA device."""
    return any(os.path.exists(trace) for trace in _CUDA_TRACES)


def trains_on_cuda(device: str) -> bool:
    """Whether `training.device` is an accelerator on this machine."""
    return device.startswith("cuda") or (device == "auto" and may_have_cuda())


def require_device(device: str) -> None:
    """Raise `InvalidConfiguration` for an accelerator that this machine does not have, as far as files tell."""
    system = (platform.system(), platform.machine())
    if device == "mps" and system != ("Darwin", "arm64"):
        problem = f"this machine is no Mac with Apple's chips ({' on '.join(system)})"
        raise InvalidConfiguration(f"training.device = 'mps': {problem}; rule: auto, cpu or cuda")
    if not device.startswith("cuda"):
        return
    cards, index = len(list(_CARDS.glob("*"))), device.partition(":")[2]
    if may_have_cuda() and not (cards and index and int(index) >= cards):
        return
    found = f"{cards} CUDA device{'s' * (cards != 1)}"
    rule = "auto, cpu" if not cards else f"auto, cpu or cuda:0 to cuda:{cards - 1}"
    raise InvalidConfiguration(f"training.device = {device!r}: this machine has {found}; rule: {rule}")


def _card_texts(cards: Path) -> list[str]:
    return [card.read_text(encoding="utf-8", errors="replace") for card in sorted(cards.glob("*/information"))]


def _measure() -> MachineSpeed:
    return codec.decode(child_process.call_child(__name__), MachineSpeed, where="the measurement of this machine")


def run(device: str = "") -> object:
    """Return the speed of this machine, or the free bytes of a device: None if it is not a CUDA device."""
    if not device:
        from cairn.model.estimates.utilization import measure_machine

        return measure_machine()
    import torch

    found = torch.device("cuda" if device == "auto" else device)
    return torch.cuda.mem_get_info(found)[0] if torch.cuda.is_available() and found.type == "cuda" else None
