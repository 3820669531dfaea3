"""The messages between parent and trainer: one JSON line each, over the child's stdin and stdout."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
from pydantic import BaseModel, ConfigDict, TypeAdapter

from cairn.model.configuration.data import NOTHING_BEFORE, DataConfig, TrainedBefore
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates.numerics import MachineSpeed
from cairn.storage.logs import log_entry, step_log
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.logs.run_members import MembersChanged
from cairn.tasks.configuration.settings import DivergenceConfig
from cairn.tasks.errors import TaskError
from cairn.tasks.policy.failures import ExceptionReport


class TrainerSpec(BaseModel):
    """Everything a trainer needs for an attempt; the first line it reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    attempt: int
    claim_id: str = ""
    store_url: str
    snapshot_id: str
    data: DataConfig
    model: ModelConfig
    allowed_code: tuple[str, ...] = ()
    training: TrainingConfig
    micro_batch: int
    activation_checkpointing: bool
    quarantined: tuple[int, ...] = ()
    divergence: DivergenceConfig
    patience_seconds: float
    threads: int
    workers: int = 1
    devices: int = 1
    resume: log_entry.CheckpointReference | None = None
    initial_weights_sha256: str | None = None
    before: TrainedBefore = NOTHING_BEFORE
    cache_dir: Path
    work_dir: Path
    prompt: str = ""
    faults: str = ""


def trained_before(origin: log_entry.ForkOrigin | None) -> TrainedBefore:
    """Return what was trained before a run's first step; nothing is known of a fork that does not say it."""
    if origin is None or origin.draws is None or origin.tokens is None:
        return NOTHING_BEFORE
    drawn = origin.component_draws
    return TrainedBefore(step=origin.checkpoint.step, draws=origin.draws, tokens=origin.tokens, component_draws=drawn)


class SpeedTrial(BaseModel):
    """A line that may come before the spec: measure what the numerics are chosen by; answered by `MachineSpeed`."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainUntil:
    """Command: train until this step is complete, then stage; not if the checkpoint before is longer on its way."""

    step: int
    stall_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Command: finish staging and exit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Event: the state is loaded; the next step trained is `step` + 1."""

    step: int
    state_sha256: str | None
    parameters: int
    device: str
    peak: log_entry.DevicePeak | None = None
    arithmetic: log_entry.Arithmetic | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """Event: a step is complete; `tokens` and `gpu_seconds` count from the attempt's start."""

    record: step_log.StepRecord
    tokens: int
    gpu_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentDone:
    """Event: training reached the commanded step, or stopped before it on SIGTERM; staging has begun.

    It has not where the checkpoint of step `behind` is still on its way: this step gets none.
    """

    step: int
    stopped: bool
    tokens: int
    gpu_seconds: float
    behind: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Event: the checkpoint of `step` is not staged after `seconds`; `why` is the store's error, or empty."""

    step: int
    why: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDropped:
    """Event: the checkpoint of `step` will not be staged, because a rank was lost that had a part of it."""

    step: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnded:
    """Event of the launcher: the rank whose exit ended all ranks; the exit code is negative for a signal."""

    rank: int
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksOutlived:
    """Event of the launcher: the others go on without these ranks, which hung, or were those of another `machine`.

    No ranks: those that hang cannot be told, or the others cannot go on.
    """

    ranks: tuple[int, ...]
    machine: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """Event of the first of several machines' launchers: the ranks meet at this port."""

    port: int


Command = TrainUntil | Finish
_Launcher = RankEnded | RanksOutlived | Listening
_Staging = StagedCheckpoint | CheckpointDropped | Waiting
Event = MachineSpeed | Ready | StepDone | SegmentDone | _Staging | MembersChanged | ExceptionReport | _Launcher
_MESSAGES: dict[str, type] = {kind.__name__: kind for kind in (*get_args(Command), *get_args(Event))}
FIRST_LINES: TypeAdapter[SpeedTrial | TrainerSpec] = TypeAdapter(SpeedTrial | TrainerSpec)
"""The lines before a trainer's commands: any number of trials, then its spec."""


def encode_message(message: Command | Event) -> bytes:
    """Return the message as one line: the name of its kind, and its content."""
    return msgspec.json.encode((type(message).__name__, message)) + b"\n"


def decode_message(line: bytes) -> Command | Event:
    """Return the message in a line; raises `TaskError` for anything else."""
    try:
        kind, content = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
        message: Command | Event = msgspec.json.decode(content, type=_MESSAGES[kind])
    except (msgspec.DecodeError, RecursionError, KeyError) as error:
        raise TaskError(f"trainer protocol: not a message: {line[:200]!r}") from error
    return message
