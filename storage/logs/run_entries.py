"""The kinds of run log entries: one record for the body of each, and their stored names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cairn.storage.errors import StorageError
from cairn.storage.logs import log_entry, run_members, run_note
from cairn.storage.stores.codec import stored_list


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where an attempt ran; host, boot and pid namespace say where its pid counts.

    `start_ticks`, clock ticks from the boot to its process's start, tell it from a later process with the same pid. Of
    `nodes_wanted` machines `nodes` came, `hosts` names several; `continued_by` names who starts the run again.
    """

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int
    device: str
    world_size: int
    threads: int
    device_name: str = ""
    cores: int = 0
    nodes: int = 1
    nodes_wanted: int = 1
    continued_by: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """How many devices GPU-seconds count: one for each process, but a run on CPUs is one, whatever its ranks."""
        return 1 if self.device.startswith("cpu") else self.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision when an attempt ended: the action, the budget it was charged to, and what is left of each."""

    action: str
    reason: str
    charged: str | None = None
    left: Mapping[str, int | None] = field(default_factory=dict)
    delay_seconds: float = 0.0
    micro_batch: int | None = None
    activation_checkpointing: bool | None = None
    changed: str = ""

    @property
    def is_spent(self) -> bool:
        """Whether a budget has nothing left, which alone says what is left when a run stops."""
        return self.charged is not None and bool(self.left)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOpened:
    """A run exists: its frozen configuration, its data, and its initial weights unless they are drawn from the seed.

    The source is what is kept of their folder. A writer is at least `smallest_writer_version`; compare `Placement`.
    """

    run_id: str
    model_family: str
    config: Mapping[str, Any]
    config_sha256: str
    data_snapshot: str
    total_steps: int
    code_version: str
    initial_weights_sha256: str | None = None
    initial_source_sha256: str | None = None
    smallest_writer_version: int = log_entry.WRITER_VERSION
    nodes_wanted: int = 1
    continued_by: str = ""
    forked_from: log_entry.ForkOrigin | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStarted:
    """An attempt claims the run as its fencing epoch; `versions` compute its bits, `faults` are to be injected.

    `gathering_seconds` is how long it waited for other machines. `claim_id` names the attempt's files beside the log,
    so that no other run of this name has files of the same names; it is empty for attempts of older versions.
    """

    attempt: int
    placement: Placement
    config: Mapping[str, Any]
    config_sha256: str
    code_version: str
    micro_batch: int
    resumed_from: log_entry.CheckpointReference | None
    activation_checkpointing: bool = False
    quarantined_samples: int = 0
    changed: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    faults: str = ""
    gathering_seconds: float = 0.0
    claim_id: str = ""

    def __post_init__(self) -> None:
        if self.attempt < 1:
            raise StorageError(f"attempt-started: attempt {self.attempt}: must be at least 1")

    @property
    def first_step(self) -> int:
        """The step it started from: that of the checkpoint it resumed from, or 0."""
        return self.resumed_from.step if self.resumed_from else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedCheckpoint(log_entry.CheckpointReference):
    """A complete upload, ignored by readers until it is committed; also the trainer's message that it is staged."""

    state_sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted(StagedCheckpoint):
    """The atomic marker: this manifest, and no other, is the run at this step."""

    tokens: int
    gpu_seconds: float

    @property
    def reference(self) -> log_entry.CheckpointReference:
        """The reference that a resume needs."""
        return log_entry.CheckpointReference(
            step=self.step, attempt=self.attempt, prefix=self.prefix, manifest_sha256=self.manifest_sha256
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded:
    """Why an attempt ended, what it cost, and the decision.

    `starting_seconds` are before it could train; `last_seen_at` is its last sign of life if another process ended it.
    """

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
    peak: log_entry.DevicePeak | None = None
    arithmetic: log_entry.Arithmetic | None = None
    starting_seconds: float | None = None
    last_seen_at: datetime | None = None

    @property
    def injected(self) -> tuple[str, ...]:
        """The faults that were injected into it, such as `kill@300`."""
        return tuple(map(str, stored_list(self.evidence, "injected")))


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveVerdict:
    """A verdict on the loss curve up to a step: its kind, the reason in a sentence, the numbers, the usual cures."""

    kind: str
    why: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    cures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationOutcome:
    """An evaluation of a checkpoint under a suite has ended, and so has its pin."""

    step: int
    manifest_sha256: str
    suite: str
    suite_sha256: str
    data_snapshot: str
    started_at: datetime
    seconds: float
    pin_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecorded(EvaluationOutcome):
    """Metrics of a checkpoint under a suite, the curve's verdict, and what kept a command from other processes.

    `window_losses_sha256` names the losses by window beside the log; none for commands and older evaluations.
    """

    metrics: Mapping[str, float]
    samples: tuple[str, ...]
    evaluator_version: str
    verdict: CurveVerdict | None = None
    boundary: str = ""
    window_losses_sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFailed(EvaluationOutcome):
    """An evaluation that failed: the evaluator exited, timed out, printed no valid result, or was `refused` here."""

    detail: str
    refused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DataQuarantined:
    """Samples that no later step draws: their windows in the snapshot, and why."""

    attempt: int
    reason: str
    windows: tuple[int, ...]
    detail: str

    def __post_init__(self) -> None:
        if not self.windows or min(self.windows) < 0:
            raise StorageError(f"data-quarantined: windows {self.windows[:8]}: must be at least one, none negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadEvidence:
    """An object that did not read as promised: what was expected and found, how often it was read, on which host."""

    key: str
    expected: str
    found: str
    reads: int
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointQuarantined(log_entry.CheckpointReference):
    """No resume uses this checkpoint: with evidence until it can be read again, without because of what it holds."""

    detail: str
    evidence: tuple[ReadEvidence, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRestored(log_entry.CheckpointReference):
    """A checkpoint that was quarantined on evidence verifies: resumes may use it again."""

    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPinned(log_entry.CheckpointReference):
    """A checkpoint is pinned: an evaluation reads it, an alias is about to point at it, or a fork begins with it.

    Pins and checkpoint-superseded entries share one sequence, so nothing comes between the check and the deletion. An
    evaluation's pin ends with its outcome, or at the next attempt's start; others end with checkpoint-unpinned.
    """

    pin_id: str
    pinned_by: Placement
    alias: str | None = None
    suite_sha256: str | None = None
    during_attempt: int | None = None
    fork: str | None = None

    def __post_init__(self) -> None:
        if (purposes := [self.alias, self.suite_sha256, self.fork]).count(None) != 2:
            raise StorageError(f"checkpoint-pinned: alias, suite_sha256, fork {purposes}: exactly one must be named")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointUnpinned:
    """A pin is over, and how that is known."""

    pin_id: str
    prefix: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkAbandoned:
    """The process that pinned a fork's beginning died: the pin ends, and a late opening finds its number taken."""

    pin_id: str
    prefix: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSuperseded(log_entry.CheckpointReference):
    """Retention no longer keeps this checkpoint, and why; its bytes may be deleted."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDeleted(log_entry.CheckpointReference):
    """The bytes of a superseded checkpoint are deleted."""

    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The run needs no further attempt: its last step is committed, or `rule` stopped it early at `step`: `stopped`."""

    attempt: int
    step: int
    manifest_sha256: str
    state_sha256: str
    stopped: str = ""
    rule: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDeleted:
    """A person deleted the run: its checkpoints are superseded, and no attempt, commit or pin follows."""

    by: str
    why: str


CheckpointMoved = CheckpointQuarantined | CheckpointRestored | CheckpointSuperseded | CheckpointDeleted
RUN_KINDS: Mapping[str, type] = {
    "run-opened": RunOpened,
    "attempt-started": AttemptStarted,
    "checkpoint-committed": CheckpointCommitted,
    "members-changed": run_members.MembersChanged,
    "attempt-ended": AttemptEnded,
    "evaluation-recorded": EvaluationRecorded,
    "evaluation-failed": EvaluationFailed,
    "data-quarantined": DataQuarantined,
    "checkpoint-quarantined": CheckpointQuarantined,
    "checkpoint-restored": CheckpointRestored,
    "checkpoint-pinned": CheckpointPinned,
    "checkpoint-unpinned": CheckpointUnpinned,
    "fork-abandoned": ForkAbandoned,
    "checkpoint-superseded": CheckpointSuperseded,
    "checkpoint-deleted": CheckpointDeleted,
    "run-finished": RunFinished,
    "run-deleted": RunDeleted,
    "run-noted": run_note.RunNoted,
}
