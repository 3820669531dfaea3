"""Faults for practice and tests, from outside by `CAIRN_FAULTS`: real signals at a step, each fired once per run.

Owns the syntax `kind@step,…` and the once. A fault leaves a marker object in the run's folder before it strikes, so
that the continued run is spared.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from storage.object_store import ObjectStore
from tasks.errors import TaskError

_SIGNALS = {"preempt": signal.SIGTERM, "kill": signal.SIGKILL}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault: what happens, and at which completed step."""

    kind: str
    step: int


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Return the faults in `kill@300,preempt@812`; raise `TaskError` naming the part that is not one."""
    faults = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        kind, _, step = part.partition("@")
        if kind not in _SIGNALS or not step.isdigit():
            raise TaskError(f"CAIRN_FAULTS: {part!r}: must be KIND@STEP with KIND one of {sorted(_SIGNALS)}")
        faults.append(Fault(kind=kind, step=int(step)))
    return tuple(faults)


def strike(
    faults: tuple[Fault, ...],
    store: ObjectStore,
    run_prefix: str,
    step: int,
    *,
    kill: Callable[[int, int], None] = os.kill,
) -> None:
    """Send this process the signals due at `step` that have not been sent in this run before."""
    for fault in faults:
        if fault.step == step and store.create(f"{run_prefix}/faults/{fault.kind}-{step}.json", b"{}\n"):
            kill(os.getpid(), _SIGNALS[fault.kind])
