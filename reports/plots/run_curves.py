"""The data of a run's plot: the surviving line of its steps, what happened along it, and the texts on the plot."""

import math
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

from cairn.reports.queries import alias_history, evaluations, run_lookup, run_status
from cairn.reports.queries.receipts import Receipt, read_receipts
from cairn.storage.logs import run_entries, run_log, run_state, step_log
from cairn.storage.stores import codec, object_store
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.evaluator import curve_reader
from cairn.tasks.policy.termination import TerminationReason
from cairn.tasks.text.format import format_count, short_digest

_TITLE_CHARACTERS = 44
_SUFFIXES = (".png", ".svg")
_LEAST_PX, _GREATEST_PX = 300, 10_000
Lines = Sequence[step_log.StepRecord]
ReadSteps = Callable[[object_store.ObjectStore, str, Sequence[run_state.AttemptRecord]], Lines]
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Steps that were trained again, both ends included."""

    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotedPoint:
    """A step that an alias points at or, where not `current`, pointed at before; its loss where it is known."""

    step: int
    alias: str
    current: bool
    val_loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossMark:
    """A loss that others are seen against: that of a uniform guess, or of the champion to beat."""

    label: str
    loss: float
    is_target: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCurves:
    """Everything that a plot shows; `points` are in step order, one a step.

    `interruptions` are the steps at which attempts ended before the run did, by their termination reasons.

    `tokens_per_step` is 0 where it is unknown or that of a fork's parent was another, `verdict` empty where it is
    unknown. `inherited` are the steps of the runs that this one descends from by forks, `ancestors`, oldest first, each
    up to where the next one begins.
    """

    run_id: str
    model_family: str
    state: str
    verdict: str
    snapshot_id: str
    total_steps: int
    tokens_per_step: int
    attempts: int
    gpu_seconds: float
    points: tuple[step_log.StepPoint, ...]
    interruptions: Mapping[str, Sequence[int]]
    replays: tuple[Replay, ...]
    held_out: tuple[evaluations.HeldOutPoint, ...]
    promotions: tuple[PromotedPoint, ...]
    end: run_entries.RunFinished | None
    marks: tuple[LossMark, ...] = ()
    ancestors: tuple[str, ...] = ()
    inherited: tuple[step_log.StepPoint, ...] = ()

    @property
    def best(self) -> evaluations.HeldOutPoint | None:
        """The checkpoint with the least held-out loss."""
        return evaluations.find_best(self.held_out)

    @property
    def last_step(self) -> int:
        """The last step of the surviving line, recorded or evaluated; 0 before the first."""
        recorded = self.points[-1].record.step if self.points else 0
        return max(recorded, *(point.step for point in self.held_out), 0)

    @property
    def reasons(self) -> tuple[tuple[str, int], ...]:
        """Each termination reason with its number of attempts, the most frequent first."""
        counts = ((reason, len(steps)) for reason, steps in self.interruptions.items())
        return tuple(sorted(counts, key=lambda pair: (-pair[1], pair[0])))


def gather_curves(
    log: run_log.RunLog,
    lines: Lines | None = None,
    receipts: Sequence[Receipt] | None = None,
    read: ReadSteps = step_log.read_step_records,
) -> RunCurves:
    """Return the curves of a run that was read; reads the registry too, and records and receipts that are not given."""
    state, receipts = log.state, read_receipts(log, run_lookup.read_beat(log)) if receipts is None else receipts
    lines = read(log.store, log.prefix, state.attempts) if lines is None else lines
    points, reached = step_log.splice(lines, state.attempts), Counter[int]()
    for line in lines:
        reached[line.attempt] = max(line.step, reached[line.attempt])
    interruptions = defaultdict[str, list[int]](list)
    for ended in filter(None, (record.ended for record in state.attempts)):
        if ended.reason != TerminationReason.COMPLETED:
            interruptions[ended.reason].append(max(ended.last_step, reached[ended.attempt]))
    decided = alias_history.list_promotions(log.store)
    promotions = (item for item in reversed(decided) if item.run_id == log.run_id)
    # One point a step, however often it was promoted.
    promoted = {(item.alias, item.step or 0): item for item in promotions}
    inherited = dict(_inherited(log.store, state, read))
    newest = max(state.evaluations, key=lambda item: item.step, default=None)
    return RunCurves(
        run_id=log.run_id,
        model_family=state.opened.model_family if state.opened else "",
        state=run_status.phase_of(state),
        verdict=newest.verdict.kind if newest and newest.verdict else "",
        snapshot_id=state.opened.data_snapshot if state.opened else "",
        total_steps=state.opened.total_steps if state.opened else 0,
        tokens_per_step=0 if run_lookup.tokens_at(state, 0) else run_lookup.tokens_per_step(state),
        attempts=len(state.attempts),
        gpu_seconds=sum(receipt.gpu_seconds for receipt in receipts),
        points=points,
        interruptions=interruptions,
        replays=tuple(_replays(points)),
        held_out=evaluations.list_held_out(state),
        promotions=tuple(
            PromotedPoint(
                step=step,
                alias=alias,
                current=item.current,
                val_loss=item.evaluation.metrics.get(evaluations.VAL_LOSS) if item.evaluation else None,
            )
            for (alias, step), item in sorted(promoted.items(), key=lambda pair: pair[0])
        ),
        end=state.finished,
        marks=tuple(_marks(log, decided)),
        ancestors=tuple(inherited),
        inherited=tuple(chain.from_iterable(inherited.values())),
    )


def _marks(log: run_log.RunLog, promotions: Sequence[alias_history.AliasDecision]) -> Iterator[LossMark]:
    """Yield a uniform guess, then the champion of another run on the same data, which this run's best is offered to."""
    state = log.state
    if size := curve_reader.vocab_size_of(log.store, state):
        yield LossMark(label=f"chance, ln({size:,})", loss=math.log(size), is_target=False)
    alias = codec.stored_value(run_lookup.configuration_document(state), "promotion", "alias", str)
    data, suite = state.opened and state.opened.data_snapshot, curve_reader.curve_suite(state)
    for item in promotions:
        held = item.evaluation if item.current and item.alias == alias and item.run_id != log.run_id else None
        loss = held.metrics.get(evaluations.VAL_LOSS) if held and held.data_snapshot == data else None
        if held and loss is not None and suite in (None, held.suite_sha256):
            yield LossMark(label=f"to beat: {alias}, {item.run_id}@{item.step}", loss=loss, is_target=True)


def _inherited(
    store: object_store.ObjectStore, state: run_state.RunState, read: ReadSteps
) -> Iterator[tuple[str, tuple[step_log.StepPoint, ...]]]:
    """Yield each ancestor by forks, the oldest first, with its steps up to where the next one begins."""
    if state.origin is None:
        return
    parent, step = run_log.RunLog(store, state.origin.run_id), state.origin.checkpoint.step
    before = parent.refresh()
    if before.beginning is None or before.beginning.step < step:  # a log that was tampered with cannot lead in circles
        yield from _inherited(store, before, read)
    points = step_log.splice(read(store, parent.prefix, before.attempts), before.attempts)
    yield parent.run_id, tuple(point for point in points if point.record.step <= step)


def _replays(points: Sequence[step_log.StepPoint]) -> Iterator[Replay]:
    """Yield the runs of neighbouring points that were trained more than once."""
    for is_again, group in groupby(points, key=lambda point: point.replays > 0):
        if is_again:
            steps = [point.record.step for point in group]
            yield Replay(first_step=steps[0], last_step=steps[-1])


def format_title(curves: RunCurves) -> str:
    """Return the run's id, shortened in the middle where it is long, and the model family."""
    name, half = curves.run_id, _TITLE_CHARACTERS // 2
    shown = name if len(name) <= _TITLE_CHARACTERS else f"{name[:half]}…{name[-half:]}"
    return "  ·  ".join(word for word in (shown, curves.model_family) if word)


def describe_state(curves: RunCurves) -> str:
    """Return the state, and the verdict on the curve where there is one."""
    return "  ·  ".join(word for word in (curves.state, curves.verdict) if word)


def describe_run(curves: RunCurves) -> str:
    """Return steps, tokens, device time, attempts and data snapshot."""
    total = f" of {curves.total_steps:,}" if curves.total_steps else ""
    tokens = f"{format_number(curves.last_step * curves.tokens_per_step)} tokens" if curves.tokens_per_step else ""
    hours, minutes = curves.gpu_seconds / 3600, curves.gpu_seconds / 60
    spent = f"{hours:,.1f} device hours" if hours >= 1 else f"{minutes:.1f} device minutes"
    attempts, data = format_count(curves.attempts, "attempt"), short_digest(curves.snapshot_id or None)
    parts = (f"step {curves.last_step:,}{total}", tokens, spent, attempts, f"data snapshot {data}")
    return "   ·   ".join(filter(None, parts))


def format_number(number: float) -> str:
    """Return a number with at most four digits and a unit: `1.25M`."""
    size = next(((unit, name) for unit, name in _UNITS if abs(number) >= unit), (1.0, ""))
    return f"{number / size[0]:.4g}{size[1]}"


def plot_form(file: Path, **pixels: int) -> str:
    """Return the format that a plot's suffix names: png or svg; raises `InvalidConfiguration`, for its size too."""
    if file.suffix.lower() not in _SUFFIXES:
        raise InvalidConfiguration(f"{file}: must end in {' or '.join(_SUFFIXES)}; the suffix says the format")
    for name, value in pixels.items():
        if not _LEAST_PX <= value <= _GREATEST_PX:
            raise InvalidConfiguration(f"--{name} {value}: must be {_LEAST_PX} to {_GREATEST_PX} pixels")
    return file.suffix.lower().removeprefix(".")


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPlot:
    """The written file and what the plot shows."""

    run_id: str
    file: str
    bytes: int
    sha256: str
    width_px: int
    height_px: int
    last_step: int
    attempts: int
    interruptions: Mapping[str, int]


def write_output(path: Path, content: bytes) -> int:
    """Replace the file atomically, so that a viewer never reads half of it; returns its size in bytes."""
    temporary = path.absolute().parent / f".{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:  # its permissions follow the umask
            file.write(content)
        os.replace(temporary, path)
        return len(content)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        missing = isinstance(error, FileNotFoundError)
        problem = "its folder does not exist; make it first" if missing else f"cannot be written: {error.strerror}"
        raise InvalidConfiguration(f"{path}: {problem}") from error
