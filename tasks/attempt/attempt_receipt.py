"""The receipt of an attempt: what it did and cost (time up to its last commit is useful), why it ended, what next."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from storage.logs.run_entries import AttemptEnded, AttemptStarted, DevicePeak
from storage.logs.run_state import RunState
from storage.stores.document import decode, encode, project
from tasks.configuration.settings import BudgetsConfig
from tasks.policy.attempt_sizes import AttemptSizes, MemoryRoom, choose_lighter, lighter_sizes
from tasks.policy.budgets import FailureImpact, decide
from tasks.policy.failures import Evidence, Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """How far an attempt got and what it used, as far as is known; see `AttemptEnded`."""

    last_step: int
    tokens: int
    gpu_seconds: float
    peak: DevicePeak | None = None
    starting_seconds: float | None = None
    last_seen_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOver:
    """What is known of an ended attempt; `jitter` in [0, 1) shortens the next delay, `room` is the memory for it."""

    attempt: int
    evidence: Evidence
    usage: Usage
    jitter: float = 0.0
    room: MemoryRoom | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """What helps against bad data: quarantine of `windows`, and of checkpoints from a spike's `before_step` on."""

    windows: tuple[int, ...] = ()
    repaired_objects: tuple[str, ...] = ()
    before_step: int | None = None


NO_REMEDY = Remedy()


def write_receipt(
    state: RunState, failure: Failure, over: AttemptOver, *, budgets: BudgetsConfig, remedy: Remedy = NO_REMEDY
) -> AttemptEnded:
    """Return the entry that ends the open attempt of `state`, including the decision on what follows."""
    owner, number, usage = state.open_attempt, over.attempt, over.usage
    if owner is None or owner.started.attempt != number:
        raise ValueError(f"attempt {number} is not open: only the open attempt can be ended")
    useful = owner.committed_gpu_seconds
    gpu_seconds = max(usage.gpu_seconds, useful)
    last_step = max(usage.last_step, owner.last_committed_step or 0)
    before = {window for item in state.quarantines if item.attempt != number for window in item.windows}
    sizes = project(owner.started, AttemptSizes)
    impact = FailureImpact(
        last_step=last_step,
        sizes=sizes,
        lighter=_find_lighter(owner.started, sizes, over.room),
        wasted_gpu_seconds=gpu_seconds - useful,
        quarantined_samples=len(set(remedy.windows) - before),
        repaired_objects=remedy.repaired_objects,
    )
    return project(
        failure,
        AttemptEnded,
        attempt=number,
        last_step=last_step,
        tokens=max(usage.tokens, owner.committed_tokens),
        gpu_seconds=gpu_seconds,
        useful_gpu_seconds=useful,
        wasted_gpu_seconds=gpu_seconds - useful,
        stderr_tail=over.evidence.stderr_tail,
        decision=decide(budgets, state, failure, impact, jitter=over.jitter),
        evidence=evidence_document(over.evidence),
        peak=usage.peak,
        starting_seconds=usage.starting_seconds,
        last_seen_at=usage.last_seen_at,
    )


def _find_lighter(started: AttemptStarted, sizes: AttemptSizes, room: MemoryRoom | None) -> AttemptSizes | None:
    training = started.config.get("training", {})
    lighter = lighter_sizes(
        sizes,
        global_batch=training.get("global_batch", sizes.micro_batch),
        processes=started.placement.world_size,
        mode=training.get("parallel", "ddp"),
        halves_first=training.get("on_oom") == "halve",
    )
    return choose_lighter(sizes, lighter, room)


def evidence_document(evidence: Evidence) -> dict[str, Any]:
    """Return the evidence as JSON for the receipt; the last lines of stderr are a separate field there."""
    return decode(encode(replace(evidence, stderr_tail=())), dict, where="evidence")
