"""The arithmetic speed of this machine, cached in the work folder, and the free memory of its accelerator.

Also what one step of a network of one's own takes here, if it can be trained at all. A child measures, and imports
torch; it alone runs the module's files.
"""

import os
import platform
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, ConfigDict

from cairn.model.configuration.network import RUN_AS, ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.errors import InvalidInput, ModelError
from cairn.model.estimates.numerics import MachineSpeed, NumericsChoice, benefits_from_cpu_bf16, choose_numerics
from cairn.model.estimates.size_estimate import DEVICE_RUNTIME_BYTES, RUNTIME_BYTES, MemoryEstimate
from cairn.model.estimates.step_memory import FP32_BYTES
from cairn.storage.errors import IntegrityError
from cairn.storage.stores import child_process, codec
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import replace_file

_TRIAL_SECONDS, _TAIL_LINES = 600.0, 6
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
        output = child_process.call_child(f"{__name__}:free_bytes_in_child", device).strip()
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
    printed = child_process.call_child("cairn.model.estimates.utilization:measure_machine")
    return codec.decode(printed, MachineSpeed, where="the measurement of this machine")


def free_bytes_in_child(name: str) -> int | None:
    """Return the free bytes of a device, None if it is not a CUDA device."""
    import torch

    device = torch.device("cuda" if name == "auto" else name)
    return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() and device.type == "cuda" else None


class _Trial(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    model: ModelConfig
    training: TrainingConfig
    files: dict[str, bytes]
    vocab_size: int


def try_module(config: RunConfig, vocab_size: int, sizes: Mapping[str, Any]) -> MemoryEstimate:
    """Return the memory of a trainer of this module with these keys of [training], by one step in a child.

    Raises InvalidConfiguration if it takes none.
    """
    auto = {"precision": "fp32"} if config.training.precision == "auto" else {}
    training = config.training.model_copy(update={**auto, **sizes, "kernels": "stock"})
    trial = _Trial(model=config.model, training=training, files=config.code.files, vocab_size=vocab_size)
    return _try(trial.model_dump_json().encode())


@cache
def _try(trial: bytes) -> MemoryEstimate:
    try:
        printed = child_process.call_child(f"{__name__}:take_step_in_child", given=trial, limit_seconds=_TRIAL_SECONDS)
        return codec.decode(printed, MemoryEstimate, where="it ended without a result")
    except (OSError, subprocess.SubprocessError, IntegrityError) as error:
        ended = f"it ended with code {getattr(error, 'returncode', 0)}; the system ends one without memory with -9"
        said = getattr(error, "stderr", None) or (ended if hasattr(error, "returncode") else str(error)).encode()
        last = "\n".join(said.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:])
        raise InvalidConfiguration(f"model.module: one step of it was tried, and failed:\n{last}") from error


def _take_step(trial: _Trial) -> MemoryEstimate:
    import torch

    from cairn.model.training import determinism, optimizer, train_state, training_step

    training, micro_batch = trial.training, int(trial.training.micro_batch)
    determinism.make_deterministic(seed=training.seed, threads=training.threads, arithmetic=training.arithmetic)
    device = determinism.resolve_device(training.device)
    state = train_state.TrainState.create(trial.model, training, trial.vocab_size, device, files=trial.files)
    tokens = torch.randint(trial.vocab_size, (micro_batch, trial.model.block_size + 1))  # (b, T+1)
    training_step.mean_loss(state, tokens, training).backward()
    optimizer.update_weights(state.optimizers)
    on_cuda, unit = device.type == "cuda", 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - RUNTIME_BYTES
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else peak
    weights, kept = FP32_BYTES * state.model.parameter_count, sum(one.tensor.nbytes for one in state.live_tensors())
    sums = (-(-training.global_batch // micro_batch) - 1).bit_length()
    runtime = DEVICE_RUNTIME_BYTES if on_cuda else RUNTIME_BYTES
    return MemoryEstimate(
        parameters_bytes=weights,
        gradients_bytes=weights * max(1, sums),
        optimizer_bytes=kept - weights,
        activations_bytes=max(0, peak - kept - weights),
        logits_bytes=0,
        host_copy_bytes=0 if on_cuda else kept,
        runtime_bytes=runtime,
        allocator_bytes=0,
        evaluator_bytes=runtime + 2 * weights,
    )


def take_step_in_child() -> MemoryEstimate:
    """Return the memory that the trial on stdin takes; the files may leave with any message."""
    try:
        return _take_step(_Trial.model_validate_json(sys.stdin.buffer.read()))
    except InvalidInput as error:  # explains itself
        sys.exit(str(error))
    except (Exception, SystemExit) as error:
        own = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(RUN_AS)]
        where = "".join(f"{PurePath(one.filename).name}, line {one.lineno}, in {one.name}: " for one in own[-1:])
        sys.exit(f"{where}{type(error).__name__}: {error}")
