"""The receipt of an attempt that ends: what it did, why it ended, what it cost, what was decided.

Owns the arithmetic of useful and wasted device time: useful is what was spent up to the attempt's last commit.
"""

from dataclasses import dataclass

from storage.run_entries import AttemptEnded
from storage.run_state import RunState
from tasks.budgets import decide
from tasks.failures import Failure
from tasks.settings import BudgetsConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """How far an attempt got and what it used, as last known."""

    last_step: int
    tokens: int
    gpu_seconds: float


def write_receipt(
    state: RunState, failure: Failure, usage: Usage, *, budgets: BudgetsConfig, stderr_tail: tuple[str, ...]
) -> AttemptEnded:
    """Return the entry that ends the open attempt of `state`, with the decision that follows from it."""
    owner = state.open_attempt
    if owner is None:
        raise ValueError("open_attempt=None: only an open attempt can be ended")
    number = owner.started.attempt
    committed = [record.committed for record in state.checkpoints if record.committed.attempt == number]
    useful = max((item.gpu_seconds for item in committed), default=0.0)
    gpu_seconds = max(usage.gpu_seconds, useful)
    last_step = max([usage.last_step, *(item.step for item in committed)])
    return AttemptEnded(
        attempt=number,
        reason=failure.reason,
        detail=failure.detail,
        fingerprint=failure.fingerprint,
        last_step=last_step,
        tokens=max([usage.tokens, *(item.tokens for item in committed)]),
        gpu_seconds=gpu_seconds,
        useful_gpu_seconds=useful,
        wasted_gpu_seconds=gpu_seconds - useful,
        stderr_tail=stderr_tail,
        decision=decide(budgets, state, failure, last_step=last_step, micro_batch=owner.started.micro_batch),
    )
