"""What a run log entry can say: one record per kind, and the names they have on disk.

Owns the vocabulary of ARCHITECTURE sections 1 and 2. Refuses to know what follows from an entry: `run_state` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from storage.errors import StorageError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReference:
    """Names one committed checkpoint by its weights: enough to resume from it."""

    step: int
    attempt: int
    prefix: str
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where an attempt ran; `process_started` tells a re-used pid from the owner's."""

    host: str
    boot_id: str
    pid: int
    process_started: float
    device: str
    world_size: int
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided when an attempt ended: the action, what paid for it and what is left."""

    action: str
    reason: str
    charged: str | None = None
    left: Mapping[str, int | None] = field(default_factory=dict)
    delay_seconds: float = 0.0
    micro_batch: int | None = None
    activation_checkpointing: bool | None = None
    changed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOpened:
    """A run exists: its frozen configuration, its data, and the weights step 0 has where it does not draw its own."""

    run_id: str
    model_family: str
    config: Mapping[str, Any]
    config_sha256: str
    data_snapshot: str
    total_steps: int
    code_version: str
    initial_weights_sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted:
    """An attempt claims the run; its number is the fencing epoch."""

    attempt: int
    placement: Placement
    config: Mapping[str, Any]
    config_sha256: str
    code_version: str
    flow_run_id: str | None
    micro_batch: int
    resumed_from: CheckpointReference | None
    activation_checkpointing: bool = False
    quarantined_samples: int = 0
    changed: str = ""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if self.attempt < 1:
            raise StorageError(f"attempt-started: attempt {self.attempt}: must be at least 1")

    @property
    def first_step(self) -> int:
        """The step it set out from: where it resumed, or 0."""
        return self.resumed_from.step if self.resumed_from else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted:
    """The atomic marker: this manifest, and no other bytes, is the run at this step."""

    step: int
    attempt: int
    prefix: str
    manifest_sha256: str
    state_sha256: str
    bytes: int
    tokens: int
    gpu_seconds: float

    @property
    def reference(self) -> CheckpointReference:
        """What a resume needs of it."""
        return CheckpointReference(
            step=self.step, attempt=self.attempt, prefix=self.prefix, manifest_sha256=self.manifest_sha256
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded:
    """Why an attempt ended, what it cost, and what was decided next."""

    attempt: int
    reason: str
    detail: str
    fingerprint: str
    last_step: int
    tokens: int
    gpu_seconds: float
    useful_gpu_seconds: float
    wasted_gpu_seconds: float
    stderr_tail: tuple[str, ...]
    decision: Decision
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveVerdict:
    """What the loss curve up to a step looks like: one kind, why in a sentence, the numbers, and the usual cures."""

    kind: str
    why: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    cures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecorded:
    """Metrics of exact weights under an exact suite, and the verdict on the curve up to them where there is one."""

    step: int
    manifest_sha256: str
    suite: str
    suite_sha256: str
    data_snapshot: str
    metrics: Mapping[str, float]
    samples: tuple[str, ...]
    evaluator_version: str
    started_at: datetime
    seconds: float
    hold_id: str | None = None
    verdict: CurveVerdict | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFailed:
    """An evaluator that exited, timed out or printed nonsense; training is not concerned."""

    step: int
    manifest_sha256: str
    suite: str
    suite_sha256: str
    data_snapshot: str
    detail: str
    started_at: datetime
    seconds: float
    hold_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataQuarantined:
    """Samples that are never drawn again, by this or any later attempt: which windows of the snapshot, and why."""

    attempt: int
    reason: str
    windows: tuple[int, ...]
    detail: str

    def __post_init__(self) -> None:
        """Refuse a quarantine of nothing."""
        if not self.windows or min(self.windows) < 0:
            raise StorageError(f"data-quarantined: windows {self.windows[:8]}: must be at least one, none negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointQuarantined:
    """A committed checkpoint found unreadable, and why; resumes skip it from here on."""

    step: int
    attempt: int
    prefix: str
    manifest_sha256: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPinned:
    """Somebody needs these bytes: an evaluation that reads them, or an alias about to point at them.

    A hold and a superseding compete for one sequence, so there is no moment between looking and deleting. An
    evaluation's hold ends with its outcome or, where it was part of an attempt, with the next attempt's start; every
    other hold ends when it is released, on proof.
    """

    step: int
    attempt: int
    prefix: str
    manifest_sha256: str
    hold_id: str
    holder: Placement
    alias: str | None = None
    suite_sha256: str | None = None
    during_attempt: int | None = None

    def __post_init__(self) -> None:
        """Refuse a hold for nothing or for two things."""
        if (self.alias is None) == (self.suite_sha256 is None):
            raise StorageError(
                f"checkpoint-held: alias {self.alias!r}, suite_sha256 {self.suite_sha256!r}: exactly one must be named"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointUnpinned:
    """A hold is over, and how that is known."""

    hold_id: str
    prefix: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSuperseded:
    """Retention no longer keeps this checkpoint, and why; its bytes may be deleted from here on."""

    step: int
    attempt: int
    prefix: str
    manifest_sha256: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDeleted:
    """The bytes of a superseded checkpoint are gone."""

    step: int
    attempt: int
    prefix: str
    manifest_sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The run needs no further attempt: its last step is committed, or `rule` of its policy stopped it early.

    `stopped` says why, empty where every step was trained; `step` is then the step whose evaluation decided.
    """

    attempt: int
    step: int
    manifest_sha256: str
    state_sha256: str
    stopped: str = ""
    rule: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownBody:
    """An entry of a newer kind, or of a newer format `version`, than this reader knows: kept, not interpreted."""

    kind: str
    content: Mapping[str, Any]
    version: int = 1


RUN_KINDS: Mapping[str, type] = {
    "run-opened": RunOpened,
    "attempt-started": AttemptStarted,
    "checkpoint-committed": CheckpointCommitted,
    "attempt-ended": AttemptEnded,
    "evaluation-recorded": EvaluationRecorded,
    "evaluation-failed": EvaluationFailed,
    "data-quarantined": DataQuarantined,
    "checkpoint-quarantined": CheckpointQuarantined,
    "checkpoint-held": CheckpointPinned,
    "checkpoint-released": CheckpointUnpinned,
    "checkpoint-superseded": CheckpointSuperseded,
    "checkpoint-deleted": CheckpointDeleted,
    "run-finished": RunFinished,
}
