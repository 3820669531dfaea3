"""Faults for practice and tests, from outside by `CAIRN_FAULTS`: real ones, each fired once per run.

Owns the syntax `kind@number,…`, the once, and how each strikes: a real signal, a real allocator error, a really flipped
byte, a real silence. A fault leaves a marker object in the run's folder before it strikes, so that the continued run is
spared. The number is a completed step; of `evaluator` it is the evaluation's.
"""

import mmap
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from storage.stores.object_store import ObjectStore
from tasks.errors import TaskError

PREEMPT, KILL, OOM, BAD_DATA, HANG, EVALUATOR = "preempt", "kill", "oom", "bad-data", "hang", "evaluator"
TRAINER_KINDS = (PREEMPT, KILL, OOM, BAD_DATA, HANG)
KINDS = (*TRAINER_KINDS, EVALUATOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault: what happens, and at which completed step or which evaluation."""

    kind: str
    number: int


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Return the faults in `kill@300,preempt@812`; raise `TaskError` naming the part that is not one."""
    faults = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        kind, _, number = part.partition("@")
        if kind not in KINDS or not (number.isascii() and number.isdigit()):
            raise TaskError(f"CAIRN_FAULTS: {part!r}: must be KIND@NUMBER with KIND one of {', '.join(KINDS)}")
        faults.append(Fault(kind=kind, number=int(number)))
    return tuple(faults)


def due(
    faults: Iterable[Fault], store: ObjectStore, run_prefix: str, number: int, *, kinds: Iterable[str]
) -> Iterator[str]:
    """Yield the kinds due at `number` that have not struck in this run before; each is marked as it is yielded."""
    wanted = set(kinds)
    for fault in faults:
        marker = f"{run_prefix}/faults/{fault.kind}-{fault.number}.json"
        if fault.kind in wanted and fault.number == number and store.create(marker, b"{}\n"):
            yield fault.kind


def strike_process(kind: str) -> None:
    """Do to this process what `kind` says: send it the signal, or fall silent for ever."""
    match kind:
        case "preempt":
            os.kill(os.getpid(), signal.SIGTERM)
        case "kill" | "evaluator":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            threading.Event().wait()


def flip_byte(files: Iterable[Path], tokens: bytes) -> None:
    """Flip the highest bit of the first of these little-endian 16-bit tokens where it lies on disk.

    Raises `TaskError` where no file holds them: the fault would not be a real one.
    """
    for path in files:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            position = content.find(tokens)
            if position >= 0:
                content[position + 1] ^= 0x80
                content.flush()
                return
    raise TaskError("CAIRN_FAULTS: bad-data: no shard on this disk holds the next batch; nothing was flipped")
