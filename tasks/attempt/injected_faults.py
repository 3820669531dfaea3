"""Injects faults that `CAIRN_FAULTS` lists (`kind@number,…`), for practice and tests: each once per run, and real.

The number is a completed step; of `pause-load` it is the attempt, of the evaluator's kinds the evaluation. `sdc` flips
a bit of a weight in silence. A pause ends when the object `faults/KIND-NUMBER-go.json` exists in the run's folder.
Markers in the run's folder record which faults were injected, so that receipts name them.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from cairn.storage.errors import StorageError
from cairn.storage.logs.run_entries import AttemptStarted
from cairn.storage.stores import codec, object_store
from cairn.tasks.errors import TaskError

_POLL_SECONDS = 0.02


class FaultKind(StrEnum):
    """The kinds of faults."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marker:
    attempt: int


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
    """The faults of one run; a marker object in the run's folder records each that was injected."""

    def __init__(self, store: object_store.ObjectStore, run_prefix: str, text: str, *, attempt: int = 0) -> None:
        """Parse the faults as `parse_faults` does; they are injected into `attempt`, 0 stands for an evaluator."""
        self._store, self._run_prefix, self._attempt = store, run_prefix, attempt
        self._faults = parse_faults(text)

    @property
    def steps(self) -> list[int]:
        """The steps after which there are faults."""
        return [number for kind, number in self._faults if kind in AFTER_STEP]

    def due(self, number: int, kinds: frozenset[FaultKind] = AFTER_STEP) -> Iterator[FaultKind]:
        """Yield the faults of these kinds due at `number`; each is marked first, so it comes once."""
        for kind, at in self._faults:
            key, marker = _marker_key(self._run_prefix, kind, at), codec.encode(_Marker(attempt=self._attempt))
            if at == number and kind in kinds and self._store.create(key, marker):
                yield kind

    def pause(self, kind: FaultKind, number: int, *, stopping: Callable[[], bool] = lambda: False) -> None:
        """Block until the object that ends this pause exists, or `stopping` returns True."""
        go = _marker_key(self._run_prefix, kind, number).removesuffix(".json") + "-go.json"
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


def injected_faults(store: object_store.ObjectStore, run_prefix: str, started: AttemptStarted) -> tuple[str, ...]:
    """Return the faults that were injected into the attempt, such as `kill@300`; none where they cannot be read."""
    if not started.faults:
        return ()
    with suppress(StorageError):
        keys = [key for key in store.keys(f"{run_prefix}/faults") if not key.endswith("-go.json")]  # that ends a pause
        markers = {key: codec.decode(store.read(key), _Marker, where=key) for key in keys}
        mine = [key for key, marker in markers.items() if marker.attempt == started.attempt]
        named = (key.rpartition("/")[2].removesuffix(".json").rpartition("-") for key in mine)
        return tuple(f"{kind}@{number}" for number, kind in sorted((int(number), kind) for kind, _, number in named))
    return ()


def evaluator_fault(store: object_store.ObjectStore, run_prefix: str, faults: str, number: int) -> str:
    """Return the fault that was injected into the evaluator of this number, such as `evaluator@2`, or ""."""
    fault = f"{FaultKind.EVALUATOR}@{number}"
    with suppress(StorageError):
        is_listed = fault in map(str.strip, faults.split(","))
        return fault if is_listed and store.size(_marker_key(run_prefix, FaultKind.EVALUATOR, number)) else ""
    return ""


def _marker_key(run_prefix: str, kind: str, number: int) -> str:
    return f"{run_prefix}/faults/{kind}-{number}.json"
