"""Injects faults that `CAIRN_FAULTS` lists (`kind@number,…`), for practice and tests: each once per run, and real.

The number is a completed step; of `pause-load` it is the attempt, of the evaluator's kinds the evaluation. `sdc` flips
a bit of a weight in silence. A pause ends when the object `faults/KIND-NUMBER-go.json` exists in the run's folder, so
that a test chooses what happens meanwhile.
"""

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

from cairn.storage.snapshots.token_shard import VerifiedShard
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.attempt.practised_faults import fault_marker, mark_fault
from cairn.tasks.errors import TaskError

_POLL_SECONDS = 0.02


class FaultKind(StrEnum):
    """What can be injected."""

    PREEMPT = "preempt"
    KILL = "kill"
    OOM = "oom"
    BAD_DATA = "bad-data"
    HANG = "hang"
    SDC = "sdc"
    PAUSE = "pause"
    PAUSE_LOAD = "pause-load"
    EVALUATOR = "evaluator"
    PAUSE_EVALUATOR = "pause-evaluator"


IN_LOAD = frozenset({FaultKind.PAUSE_LOAD})
IN_EVALUATOR = frozenset({FaultKind.EVALUATOR, FaultKind.PAUSE_EVALUATOR})
AFTER_STEP = frozenset(FaultKind) - IN_LOAD - IN_EVALUATOR
PAUSES = frozenset({FaultKind.PAUSE, FaultKind.PAUSE_LOAD, FaultKind.PAUSE_EVALUATOR})


def parse_faults(text: str) -> list[tuple[FaultKind, int]]:
    """Return the faults of a text such as `kill@300,preempt@812`; raises `TaskError` for the part that is malformed."""
    faults = list[tuple[FaultKind, int]]()
    for part in filter(None, map(str.strip, text.split(","))):
        kind, _, number = part.partition("@")
        if kind not in set(FaultKind) or not (number.isascii() and number.isdigit()):
            raise TaskError(f"CAIRN_FAULTS: {part!r}: must be KIND@NUMBER with KIND one of {', '.join(FaultKind)}")
        faults.append((FaultKind(kind), int(number)))
    return faults


class FaultPlan:
    """The faults of one run; a marker object in the run's folder says which were injected."""

    def __init__(self, store: ObjectStore, run_prefix: str, text: str, *, attempt: int = 0) -> None:
        """Parse the faults as `parse_faults` does; `attempt` practises them, 0 stands for an evaluator."""
        self._store, self._run_prefix, self._attempt = store, run_prefix, attempt
        self._faults = parse_faults(text)

    @property
    def steps(self) -> list[int]:
        """The steps after which there are faults."""
        return [number for kind, number in self._faults if kind in AFTER_STEP]

    def due(self, number: int, kinds: frozenset[FaultKind] = AFTER_STEP) -> Iterator[FaultKind]:
        """Yield the faults of these kinds due at `number`; each is marked first, so it comes once."""
        for kind, at in self._faults:
            key = fault_marker(self._run_prefix, kind, at)
            if at == number and kind in kinds and mark_fault(self._store, key, self._attempt):
                yield kind

    def pause(self, kind: FaultKind, number: int, *, stopping: Callable[[], bool] = lambda: False) -> None:
        """Block until the object that ends this pause exists, or `stopping` returns True."""
        go = fault_marker(self._run_prefix, kind, number).removesuffix(".json") + "-go.json"
        while not stopping() and self._store.size(go) is None:
            time.sleep(_POLL_SECONDS)


def inject_process_fault(kind: FaultKind) -> None:
    """Send this process the signal of a fault, or block for ever."""
    match kind:
        case FaultKind.PREEMPT:
            os.kill(os.getpid(), signal.SIGTERM)
        case FaultKind.KILL | FaultKind.EVALUATOR:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.HANG:
            threading.Event().wait()


def flip_token(shards: Iterable[VerifiedShard], position: int) -> None:
    """Flip the highest bit of the token at `position` of the shards in order, in its file on this disk."""
    for shard in shards:
        if position < len(shard):
            path, first_byte = shard.place_of(position)
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
                content[first_byte + shard.dtype.itemsize - 1] ^= 0x80
                content.flush()
            return
        position -= len(shard)
    raise IndexError(f"token {position} lies behind the last shard")
