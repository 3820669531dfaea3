"""The plan and the results of training that leaves no record; imports no torch.

Which committed segments a replay recomputes, the first step that differs, whether one batch was learned by heart.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from cairn.storage.logs import log_entry, run_entries, run_state, step_log
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.termination import ExitCode

if TYPE_CHECKING:
    from cairn.model.training.training_loop import StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The steps of one attempt from `start`, None for step 0, to `end`; `unloadable` says why `start` is gone.

    `arithmetic` is that of the attempt's receipt, None where it has none.
    """

    start: log_entry.CheckpointReference | None
    end: run_entries.CheckpointCommitted
    started: run_entries.AttemptStarted
    quarantined: tuple[int, ...]
    unloadable: str = ""
    arithmetic: log_entry.Arithmetic | None = None

    @property
    def from_step(self) -> int:
        """The step whose state it starts from."""
        return self.start.step if self.start else 0


class ReplayOutcome(StrEnum):
    """How the recomputation of a segment ended."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"
    UNREADABLE = "unreadable"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedSegment:
    """A segment: the commit at its end, its attempt's placement, the recomputed digest, the first different step."""

    from_step: int
    end: run_entries.CheckpointCommitted
    placement: run_entries.Placement
    outcome: ReplayOutcome = ReplayOutcome.SKIPPED
    computed_sha256: str | None = None
    last_equal_step: int | None = None
    first_different_step: int | None = None
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The segments that were chosen of all committed ones, and how many of them came to which outcome."""

    version: int
    run_id: str
    committed: int
    outcomes: Mapping[str, int]
    segments: tuple[ReplayedSegment, ...]

    @property
    def failed(self) -> tuple[ReplayedSegment, ...]:
        """The segments whose digest differs from the committed one, or that cannot be read."""
        return tuple(item for item in self.segments if item.outcome not in (ReplayOutcome.EQUAL, ReplayOutcome.SKIPPED))

    @property
    def exit_code(self) -> ExitCode:
        """INTEGRITY if one failed, USAGE if none was computed."""
        if all(item.outcome is ReplayOutcome.SKIPPED for item in self.segments):
            return ExitCode.USAGE
        return ExitCode.INTEGRITY if self.failed else ExitCode.DONE


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOverfit:
    """Whether one batch was learned by heart, and why; losses are in nats per token, `losses` one for each step."""

    sound: bool
    why: str
    windows: int
    tokens: int
    parameters: int
    lr: float
    precision: str
    device: str
    losses: tuple[float, ...]


def committed_segments(state: run_state.RunState) -> tuple[Segment, ...]:
    """Return every segment that was committed, by attempt; those that later attempts trained again are included."""
    records = {record.committed.prefix: record for record in state.checkpoints}
    segments = list[Segment]()
    for attempt in state.attempts:
        number, start = attempt.started.attempt, attempt.started.resumed_from
        quarantined = tuple(sorted(state.windows_quarantined_before(number)))
        arithmetic = attempt.ended.arithmetic if attempt.ended else None
        segment = partial(Segment, started=attempt.started, quarantined=quarantined, arithmetic=arithmetic)
        for record in records.values():
            if record.committed.attempt == number:
                begin, why = records.get(start.prefix) if start else None, ""
                if begin and begin.state == run_state.CheckpointState.QUARANTINED and begin.evidence:
                    why = f"its start, step {begin.committed.step}, is quarantined as unreadable"
                elif begin and begin.state in (run_state.CheckpointState.SUPERSEDED, run_state.CheckpointState.DELETED):
                    why = f"retention has removed its start, the checkpoint of step {begin.committed.step}"
                segments.append(segment(start=start, end=record.committed, unloadable=why))
                start = record.committed.reference
    return tuple(segments)


def parse_sample(text: str) -> float | None:
    """Return the percentage in a text such as 5%, None without one; raises `InvalidConfiguration`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text, re.ASCII)
    if text and (found is None or not 0 < float(found[1]) <= 100):
        raise InvalidConfiguration(f"--sample {text}: must be a percentage above 0% and up to 100%, such as 5%")
    return float(found[1]) if found else None


def choose_segments(
    segments: Sequence[Segment], *, run_id: str, from_step: int, to_step: int | None, percent: float | None
) -> tuple[Segment, ...]:
    """Return the segments with steps in (`from_step`, `to_step`], or `percent` of them: a fixed choice of some."""
    found = [s for s in segments if s.end.step > from_step and (to_step is None or s.from_step < to_step)]
    if percent is None:
        return tuple(found)
    loadable = [segment for segment in found if not segment.unloadable]
    count = math.ceil(len(loadable) * percent / 100)
    drawn = sorted(loadable, key=lambda s: hashlib.sha256(f"{run_id}/{s.end.prefix}".encode()).digest())[:count]
    return tuple(segment for segment in loadable if segment in drawn)


def find_obstacle(started: run_entries.AttemptStarted, config: RunConfig, *, torch_version: str, has_cuda: bool) -> str:
    """Return why bits of this attempt are not promised on this machine in one process; empty if they are."""
    placement, training = started.placement, config.training
    kind, torch_then = placement.device.partition(":")[0], started.versions.get("torch", "an unknown version")
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not has_cuda):
        trained = f"trained on {placement.device}, which this machine does not have"
        return f"{trained}: bits are promised for one kind of device"
    if placement.world_size > 1 and training.parallel == "fsdp":
        return f"trained by {placement.world_size} sharded processes: bits are promised for as many, a replay is one"
    if training.compile and kind == "cpu":
        return "trained on a CPU with training.compile = true: its bits are not promised"
    if torch_then != torch_version:
        return f"trained with torch {torch_then}, here is {torch_version}: bits are promised for equal versions"
    return ""


def find_other_arithmetic(then: log_entry.Arithmetic | None, here: log_entry.Arithmetic) -> str:
    """Return why this process cannot have the bits of a segment with that arithmetic, and where one can."""
    if then is None or then.digest == here.digest:
        return ""
    trained = f"trained with arithmetic {then.digest} ({then.processor}; {then.instructions}), here is {here.digest}"
    width = re.search(r"ATen (\w+)", then.instructions)
    advice = ""
    if then.processor == here.processor and width:
        advice = f"; this processor may have it: ATEN_CPU_CAPABILITY={width[1].lower()} cairn replay"
    return f"{trained} ({here.processor}; {here.instructions}): bits are promised for equal ones{advice}"


def compare_steps(
    recorded: Sequence[step_log.StepRecord], computed: "Sequence[StepResult]", *, from_step: int
) -> tuple[int, int | None]:
    """Return the last step up to which a recomputation equals an attempt's records, bit for bit, and the next one."""
    records, last_equal = {record.step: _evidence(record) for record in reversed(recorded)}, from_step
    for step in computed:
        if step.step in records and records[step.step] != _evidence(step):
            return last_equal, step.step
        last_equal = step.step if step.step in records else last_equal
    return last_equal, None


def _evidence(step: "step_log.StepRecord | StepResult") -> tuple[float, float | None, str | None]:
    norm = step.grad_norm if step.grad_norm is not None and math.isfinite(step.grad_norm) else None
    return step.train_loss, norm, step.weights_digest
