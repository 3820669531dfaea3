"""Injects faults that `CAIRN_FAULTS` lists (`kind@number,…`), for practice and tests: each once per run, and real.

The number is a completed step; for `evaluator` it is the number of the evaluation.
"""

import mmap
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from enum import StrEnum

from storage.snapshots.token_shard import VerifiedShard
from storage.stores.object_store import ObjectStore
from tasks.errors import TaskError


class FaultKind(StrEnum):
    """What can be injected; all but the last into a trainer."""

    PREEMPT = "preempt"
    KILL = "kill"
    OOM = "oom"
    BAD_DATA = "bad-data"
    HANG = "hang"
    EVALUATOR = "evaluator"


class FaultPlan:
    """The faults of one run; a marker object in the run's folder says which were injected."""

    def __init__(self, store: ObjectStore, run_prefix: str, text: str) -> None:
        """Parse `text`, such as `kill@300,preempt@812`; raises `TaskError` naming the part that is malformed."""
        self._store, self._run_prefix = store, run_prefix
        self._faults: list[tuple[FaultKind, int]] = []
        for part in filter(None, (item.strip() for item in text.split(","))):
            kind, _, number = part.partition("@")
            if kind not in set(FaultKind) or not (number.isascii() and number.isdigit()):
                raise TaskError(f"CAIRN_FAULTS: {part!r}: must be KIND@NUMBER with KIND one of {', '.join(FaultKind)}")
            self._faults.append((FaultKind(kind), int(number)))

    @property
    def numbers(self) -> list[int]:
        """The steps, or evaluations, at which there are faults."""
        return [number for _, number in self._faults]

    def due(self, number: int, *, in_evaluator: bool = False) -> Iterator[FaultKind]:
        """Yield the trainer's or the evaluator's faults due at `number`; each is marked first, so it comes once."""
        for kind, at in self._faults:
            marker = f"{self._run_prefix}/faults/{kind}-{at}.json"
            is_due = at == number and (kind is FaultKind.EVALUATOR) == in_evaluator
            if is_due and self._store.create(marker, b"{}\n"):
                yield kind


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
