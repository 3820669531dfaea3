"""The facts of one attempt for a reader who knows nothing of its run; `cairn explain --json` prints this record."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from reports.queries.evaluations import EvaluationSummary
from reports.queries.receipts import Receipt
from reports.queries.run_status import BudgetStatus
from storage.logs.log_entry import Writer
from storage.logs.run_entries import CurveVerdict, DataQuarantined
from storage.logs.run_state import CheckpointRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChange:
    """A key that differs from the previous attempt's configuration; None where one of the two lacks it."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where the attempt ran; `same_machine` compares host and boot with the previous attempt, None for the first.

    `hosts` are all machines of several; `failed_hosts` counts the attempts of the run that were lost or hung with a
    machine, for those with which more than one was.
    """

    host: str
    pid: int
    device: str
    device_name: str
    world_size: int
    threads: int
    cores: int
    boot_id: str
    same_machine: bool | None
    hosts: tuple[str, ...]
    failed_hosts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedOver:
    """A checkpoint newer than the one that was resumed, and why it was skipped: still writing, or quarantined."""

    step: int
    attempt: int
    state: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The checkpoint that the attempt started from; step 0 without `prefix` is the beginning of the run."""

    step: int
    from_attempt: int | None
    committed_at: datetime | None
    prefix: str | None
    manifest_sha256: str | None
    reached_before: int | None
    passed_over: tuple[PassedOver, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Commits, the last recorded step with its train loss in nats per token, and the steps done but not committed."""

    committed: tuple[CheckpointRecord, ...]
    recorded_step: int | None
    train_loss: float | None
    seconds: float
    lost_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How the end was recorded: the evidence; `by` is the writer, None where the attempt's own parent wrote it."""

    evidence: Mapping[str, Any]
    by: Writer | None
    by_same_host: bool
    lease_seconds: float | None
    changed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAttempt:
    """An attempt that has not ended: whether its process is known to be gone, its heartbeat's age and symptom."""

    is_gone: bool
    heartbeat_age_seconds: float | None
    symptom: str
    lease_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Successor:
    """The next attempt: when, where and at which step it started, and how it ended."""

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
    """An entry of this attempt that the fold refused, and why."""

    seq: int
    kind: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PostMortem:
    """One attempt and its run; also the JSON of `cairn explain`.

    `next` and `budgets` are the present ones. `config_changes` are against the previous attempt, `changed` is what
    the last decision made different, `faults` is what it was to practise (CAIRN_FAULTS), `quarantines` and `origin` are
    those at its start. Of a run without an attempt only the run's facts are known, and `receipt` is None.
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
    faults: str = ""
    budgets: Mapping[str, BudgetStatus] = field(default_factory=dict)
    config_changes: tuple[ConfigChange, ...] = ()
    quarantines: tuple[DataQuarantined, ...] = ()
    evaluations: tuple[EvaluationSummary, ...] = ()
    refused: tuple[Ineffective, ...] = ()
    stderr_tail: tuple[str, ...] = ()
