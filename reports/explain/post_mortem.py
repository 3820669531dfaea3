"""The facts of one attempt, for somebody who knows nothing of its run: what `cairn explain` tells and prints as JSON.

Owns which facts belong to a post-mortem, and their names. Refuses to find them (`post_mortem_facts` does) and words
(`post_mortem_text` has them).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from reports.queries.evaluations import EvaluationSummary
from reports.queries.receipts import Receipt
from reports.queries.run_status import BudgetStatus
from storage.logs.log_entry import Writer
from storage.logs.run_entries import CurveVerdict
from storage.logs.run_state import CheckpointRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChange:
    """One key that differs from the previous attempt's configuration; None where one of them does not have it."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineFact:
    """Windows of the data that were no longer drawn when the attempt started: since which attempt, and why."""

    attempt: int
    reason: str
    windows: tuple[int, ...]
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where the attempt ran; `same_machine` compares host and boot with the previous attempt's, None for the first."""

    host: str
    pid: int
    device: str
    world_size: int
    threads: int
    boot_id: str
    same_machine: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedOver:
    """A checkpoint newer than the one resumed from, and why it was not taken.

    `state` is writing (bytes without a commit), quarantined, or what became of a quarantined one since.
    """

    step: int
    attempt: int
    state: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What the attempt set out from; `step` 0 without `prefix` is the beginning."""

    step: int
    from_attempt: int | None
    committed_at: datetime | None
    prefix: str | None
    manifest_sha256: str | None
    reached_before: int | None
    passed_over: tuple[PassedOver, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far it got: commits, the last step on record with its train loss in nats, steps done and not committed."""

    committed: tuple[CheckpointRecord, ...]
    recorded_step: int | None
    train_loss: float | None
    seconds: float
    lost_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How the end came on record: `evidence` as gathered; `by` is None where the attempt's own parent wrote it."""

    evidence: Mapping[str, Any]
    by: Writer | None
    by_same_host: bool
    lease_seconds: float | None
    changed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAttempt:
    """An attempt that has not ended: whether its process is known to be gone, and how old its last sign of life is."""

    is_gone: bool
    heartbeat_age_seconds: float | None
    lease_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Successor:
    """The next attempt: when, where and from which step it set out, and what became of it."""

    attempt: int
    started_at: datetime
    seconds_later: float
    host: str
    first_step: int
    last_step: int
    termination_reason: str | None
    changed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ineffective:
    """An entry of this attempt that no reader counts, and why."""

    seq: int
    kind: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PostMortem:
    """One attempt with everything around it; also the JSON of `cairn explain`.

    Of the run: `run_id`, `model_family`, `run_state`, `run_attempts`, `total_steps`, `opened_at`, `next` (what happens
    now), `budgets` (left now). Of the attempt: `receipt` (as `cairn attempts` has it), `config_changes` against the
    previous attempt, `changed` (what the last decision made different), `quarantines` and `origin` at its start,
    `where`, `progress`, `end` or `open`, `evaluations` of its checkpoints, `verdict` on the curve, `refused` entries,
    `stderr_tail`, `successor`. Without any attempt only the run's facts are there, and `receipt` is None.
    """

    run_id: str
    model_family: str
    run_state: str
    run_attempts: int
    total_steps: int
    opened_at: datetime | None
    next: str
    receipt: Receipt | None = None
    where: Where | None = None
    origin: Origin | None = None
    progress: Progress | None = None
    end: End | None = None
    open: OpenAttempt | None = None
    successor: Successor | None = None
    verdict: CurveVerdict | None = None
    changed: str = ""
    budgets: Mapping[str, BudgetStatus] = field(default_factory=dict)
    config_changes: tuple[ConfigChange, ...] = ()
    quarantines: tuple[QuarantineFact, ...] = ()
    evaluations: tuple[EvaluationSummary, ...] = ()
    refused: tuple[Ineffective, ...] = ()
    stderr_tail: tuple[str, ...] = ()
