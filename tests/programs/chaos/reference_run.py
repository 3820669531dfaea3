"""The undisturbed counterpart of a run: the same steps in one process, with its quarantine and its sizes.

The sizes are read from the run's log; training uses the library alone: no flow, no child, no checkpoint, no resume.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.training.determinism import make_deterministic, resolve_device
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_loop import StepObserver, StepResult, train_until
from cairn.model.training.training_step import StepInputs
from cairn.reports.queries.run_lookup import configuration_of
from cairn.storage.checkpoints.payload import state_sha256
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import read_step_records, splice
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.data.snapshot_lookup import weighted_components
from cairn.tasks.trainer.tensor_exchange import to_record


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRun:
    """What became of the reference run: the digest of its last state, and its curve as (step, loss)."""

    state_sha256: str
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Steps trained with the same sizes, the last of them `end_step`."""

    end_step: int
    micro_batch: int
    recomputes: bool


def spans_of(store: ObjectStore, run_id: str, state: RunState) -> Iterator[Span]:
    """Yield with what the steps of the surviving line were trained, as the receipts of their attempts say."""
    starts = {attempt.started.attempt: attempt.started for attempt in state.attempts}
    points = splice(read_step_records(store, f"runs/{run_id}", state.attempts), state.attempts)
    sized = [(point.record.step, starts[point.record.attempt]) for point in points]
    for sizes, steps in groupby(sized, key=lambda item: (item[1].micro_batch, item[1].activation_checkpointing)):
        yield Span(end_step=[step for step, _ in steps][-1], micro_batch=sizes[0], recomputes=sizes[1])


def train_reference_of(
    store: ObjectStore, run_id: str, *, cache_dir: Path, keeps_activations: bool = False
) -> ReferenceRun:
    """Train a finished run's steps from 0 to its end, and return what that comes to.

    Activations are recomputed where the run did it, or with `keeps_activations` nowhere.
    """
    state = RunLog(store, run_id).refresh()
    assert state.opened is not None
    config = configuration_of(state)
    training = config.training
    make_deterministic(seed=training.seed, threads=training.threads)
    snapshot = open_snapshot(store, state.opened.data_snapshot, cache_dir)
    windows = TokenWindows(snapshot.train, config.model.block_size, snapshot.manifest.vocab_size)
    order = SampleOrder(
        window_count=windows.window_count,
        seed=training.seed,
        global_batch=training.global_batch,
        block_size=config.model.block_size,
        quarantined=frozenset(state.quarantined_windows),
        components=weighted_components(snapshot.manifest, config.data, config.model.block_size),
    )
    trained = TrainState.create(config.model, training, snapshot.manifest.vocab_size, resolve_device(training.device))
    steps: list[StepResult] = []
    for span in spans_of(store, run_id, state):
        trained.model.activation_checkpointing = span.recomputes and not keeps_activations
        inputs = StepInputs(windows=windows, order=order, training=training, micro_batch=span.micro_batch)
        observer = StepObserver(on_step=steps.append, stop_requested=lambda: False)
        train_until(trained, inputs, observer, until_step=span.end_step)
    return ReferenceRun(
        state_sha256=state_sha256(to_record(item.name, item.tensor) for item in trained.named_tensors()),
        curve=tuple((record.step, record.train_loss) for record in steps),
    )
