"""The undisturbed counterpart of a run: the same steps in one process, with its quarantine and its sizes.

The schedule is read from the run's log; training uses the library alone: no flow, no child, no checkpoint, no resume.
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.training.determinism import make_deterministic, resolve_device
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_loop import StepObserver, StepResult, train_until
from cairn.model.training.training_step import StepInputs
from cairn.storage.checkpoints.payload import state_sha256
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import StepPoint
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data.snapshot_lookup import weighted_components
from cairn.tasks.trainer.tensor_exchange import to_record


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Steps trained with one micro-batch, the last of them `end_step`."""

    end_step: int
    micro_batch: int
    activation_checkpointing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What a run arrived at: samples left out from the first step on, and with which sizes each step was trained."""

    quarantined: frozenset[int]
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRun:
    """What became of the reference run: the digest of its last state, and its curve as (step, loss)."""

    state_sha256: str
    curve: tuple[tuple[int, float], ...]


def schedule_of(state: RunState, curve: tuple[StepPoint, ...]) -> Schedule:
    """Return with what the steps of the surviving line were trained, as the receipts of their attempts say."""
    starts = {attempt.started.attempt: attempt.started for attempt in state.attempts}
    sized = [(point.record.step, starts[point.record.attempt]) for point in curve]
    spans = [
        Span(end_step=[step for step, _ in steps][-1], micro_batch=sizes[0], activation_checkpointing=sizes[1])
        for sizes, steps in groupby(sized, key=lambda item: (item[1].micro_batch, item[1].activation_checkpointing))
    ]
    return Schedule(quarantined=frozenset(state.quarantined_windows), spans=tuple(spans))


def train_reference_run(
    store: ObjectStore, snapshot_id: str, config: RunConfig, schedule: Schedule, *, cache_dir: Path
) -> ReferenceRun:
    """Train from step 0 to the schedule's end, and return what that comes to."""
    training = config.training
    make_deterministic(seed=training.seed, threads=training.threads)
    snapshot = open_snapshot(store, snapshot_id, cache_dir)
    windows = TokenWindows(snapshot.train, config.model.block_size, snapshot.manifest.vocab_size)
    order = SampleOrder(
        window_count=windows.window_count,
        seed=training.seed,
        global_batch=training.global_batch,
        block_size=config.model.block_size,
        quarantined=schedule.quarantined,
        components=weighted_components(snapshot.manifest, config.data, config.model.block_size),
    )
    state = TrainState.create(config.model, training, snapshot.manifest.vocab_size, resolve_device(training.device))
    steps: list[StepResult] = []
    for span in schedule.spans:
        state.model.activation_checkpointing = span.activation_checkpointing
        inputs = StepInputs(windows=windows, order=order, training=training, micro_batch=span.micro_batch)
        observer = StepObserver(on_step=steps.append, stop_requested=lambda: False)
        train_until(state, inputs, observer, until_step=span.end_step)
    return ReferenceRun(
        state_sha256=state_sha256(to_record(item.name, item.tensor) for item in state.named_tensors()),
        curve=tuple((record.step, record.train_loss) for record in steps),
    )
