"""A state too large to be twice in this machine's memory: copied to the host, staged, committed, and resumed.

What is staged stands for a state on a device: every row of a matrix is one number, so it takes next to no memory until
it is copied. What is resumed is a real one on the host. Each is a process of its own and says what it took at its peak.
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.training.train_state import NamedTensor, TrainState
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.open_store import open_store
from cairn.tasks.trainer.training_setup import CheckpointLoad
from tests.programs.benchmarks.checkpoint_savers import RUN, CairnSaver, state_bytes
from tests.programs.benchmarks.own_process import resident_bytes

CPU = torch.device("cpu")
BESIDE_BYTES = 512e6
"""What either process may take beside one state: buffers of a chunk for each transfer, and libraries."""


class StateElsewhere:
    """A state with values that are computed when they are copied: nothing of it is in this machine's memory."""

    device, cursor = CPU, 0

    def __init__(self, shape: ModelConfig, training: TrainingConfig, vocab_size: int) -> None:
        """Take names and shapes from a state without memory."""
        meta = TrainState.create(shape, training, vocab_size, torch.device("meta"), filled=False)
        self._tensors = tuple(map(with_values, meta.live_tensors()))

    def live_tensors(self) -> tuple[NamedTensor, ...]:
        """Return all tensors, sorted by name."""
        return self._tensors


def with_values(named: NamedTensor) -> NamedTensor:
    """Return a tensor of the same name, shape and dtype with values that follow from its name, one a row."""
    if named.group == "trainer":
        return named
    seed = int.from_bytes(hashlib.sha256(named.name.encode()).digest()[:7], "little")
    rows = torch.rand(named.tensor.shape[:1], generator=torch.Generator().manual_seed(seed), dtype=named.tensor.dtype)
    column = rows.view(-1, *[1] * (named.tensor.ndim - 1)) if named.tensor.ndim else rows
    return replace(named, tensor=column.expand(named.tensor.shape))


def stage(state: StateElsewhere, url: str) -> dict[str, float]:
    """Copy, stage and commit; return seconds and the peak in bytes, beside what was there before."""
    given: Any = state
    saver, peak = CairnSaver(given, url), Peak()
    saved = saver.save()
    return {"stall": saved.stall_seconds, "safe": saved.safe_seconds, "peak": peak.bytes, "state": state_bytes(given)}


def resume(state: StateElsewhere, shape: ModelConfig, training: TrainingConfig, vocab_size: int, url: str) -> Any:
    """Resume into a new state and compare every value; return seconds and the peak in bytes."""
    store, peak, began = open_store(url), Peak(), time.perf_counter()
    newest = RunLog(store, RUN).refresh().newest_committed
    assert newest is not None
    load = CheckpointLoad(store, newest.committed.reference)
    read = TrainState.create(shape, training, vocab_size, CPU, filled=False)
    load.into(read)
    said = {"seconds": time.perf_counter() - began, "peak": peak.bytes}
    differ = list(differing(read.live_tensors(), state.live_tensors()))
    assert not differ, f"{len(differ)} tensors differ, {differ[0]} first"
    return said


def differing(read: tuple[NamedTensor, ...], expected: tuple[NamedTensor, ...]) -> Iterator[str]:
    """Yield the names of tensors that are not what they must be."""
    for one, other in zip(read, expected, strict=True):
        if one.name != other.name or not torch.equal(one.tensor, other.tensor):
            yield one.name


class Peak:
    """The most memory that this process has taken since, beside what it had."""

    def __init__(self) -> None:
        self._before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: proc(5)

    @property
    def bytes(self) -> int:
        """The peak until now."""
        return resident_bytes("VmHWM") - self._before


def report(one: dict[str, float], other: dict[str, float]) -> None:
    """Print what staging and resuming took; a peak above a state and `BESIDE_BYTES` is an error."""
    size = one["state"]
    print(f"\na state of {size / 1e9:.2f} GB elsewhere, and one host copy of it")
    print(f"staged and committed in {one['safe']:.1f} s (copied in {one['stall']:.1f} s), ", end="")
    print(f"peak {one['peak'] / 1e9:.2f} GB")
    print(f"resumed, every chunk verified and every value compared, in {other['seconds']:.1f} s, ", end="")
    print(f"peak {other['peak'] / 1e9:.2f} GB")
    assert max(one["peak"], other["peak"]) <= size + BESIDE_BYTES, "more than one state and what may be beside it"
