"""What the spec says reaches the network: a trainer in this process, judged by the tensors and records it leaves."""

import os
import threading
import time
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import BadBatch, LossExploded
from cairn.model.inference.prediction import held_out_loss
from cairn.model.training.parallel import Ranks
from cairn.storage.checkpoints.checkpoint import load_checkpoint
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.logs.run_state import AttemptRecord
from cairn.storage.logs.step_log import read_step_records
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.tasks.configuration.settings import DivergenceConfig
from cairn.tasks.policy.failures import ExceptionReport, kind_of
from cairn.tasks.trainer import trainer
from cairn.tasks.trainer.trainer import StepReporter
from cairn.tasks.trainer.trainer_channel import Place, exit_on_error
from cairn.tasks.trainer.trainer_protocol import SegmentDone, StepDone
from tests.entries import NOON, started
from tests.tasks.trainer_in_process import MODEL, TRAINING, ParentEnd, TrainingWorld, reference_of

STEP_TOKENS = TRAINING["global_batch"] * MODEL["block_size"]


def gradient_norm(tensors: dict[str, torch.Tensor], beta: float) -> float:
    """Return the norm of the first step's clipped gradient: what AdamW's first moments hold of it."""
    moments = [tensor for name, tensor in tensors.items() if name.endswith(".exp_avg")]
    return float(torch.cat([tensor.reshape(-1) for tensor in moments]).norm()) / (1 - beta)


def test_attention_stays_within_documents_where_the_run_says_so(world: TrainingWorld) -> None:
    with world.opened(world.spec(training={"mask_documents": True})) as (trainer, parent):
        assert trainer._state.model.boundary_id == world.manifest.end_of_text_id
        trainer.train_segment(1)
    crossing = world.train(world.spec(2), 1)
    assert parent.losses != crossing.parent.losses


@pytest.mark.parametrize("limit", [0.01, 0.02])
def test_a_gradient_is_cut_to_its_greatest_norm(world: TrainingWorld, limit: float) -> None:
    trained = world.train(world.spec(training={"grad_clip": limit}), 1)
    assert trained.parent.records[0].grad_norm > 2 * limit
    assert gradient_norm(dict(trained.tensors), 0.9) == pytest.approx(limit, rel=1e-3)


def test_without_a_limit_the_gradient_is_taken_whole(world: TrainingWorld) -> None:
    trained = world.train(world.spec(training={"grad_clip": 0.0}), 1)
    assert gradient_norm(dict(trained.tensors), 0.9) == pytest.approx(trained.parent.records[0].grad_norm, rel=1e-3)


def test_later_epochs_draw_windows_that_begin_at_other_tokens(world: TrainingWorld) -> None:
    with world.opened(world.spec()) as (trainer, _):
        order, windows = trainer._data.inputs.order, trainer._data.inputs.windows
    epochs = order.windows_between(0, 3 * windows.window_count // TRAINING["global_batch"]).ravel()
    offsets = windows.first_tokens(epochs) % MODEL["block_size"]
    assert not offsets[: windows.window_count].any() and len(set(offsets.tolist())) == 3


def test_no_step_draws_a_quarantined_window(world: TrainingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, gather = set[int](), TokenWindows.gather

    def noting(self: TokenWindows, indexes: Any, into: Any = None) -> Any:
        drawn.update(indexes.tolist())
        return gather(self, indexes, into)

    monkeypatch.setattr(TokenWindows, "gather", noting)
    world.train(world.spec(), 4)
    spoiled = tuple(sorted(drawn))[:5]
    drawn.clear()
    world.train(world.spec(2, quarantined=spoiled), 4)
    assert drawn and not drawn & set(spoiled)


def test_the_probe_measures_held_out_text_and_not_the_train_split(world: TrainingWorld) -> None:
    training = {"probe_every_steps": 2, "probe_batches": 3, "sample_tokens": 5}
    with world.opened(world.spec(training=training, prompt="a")) as (trainer, parent):
        trainer.train_segment(2)
        snapshot = open_snapshot(world.store, world.snapshot_id, world.folder / "cache")
        held_out = TokenWindows(snapshot.val, MODEL["block_size"], snapshot.manifest.vocab_size)
        expected, _ = held_out_loss(trainer._state.model, held_out, batches=3, batch_size=8)
    assert [record.probe_loss for record in parent.records] == [None, expected]


def test_the_slice_of_the_probe_is_the_same_for_any_micro_batch(world: TrainingWorld) -> None:
    training = {"probe_every_steps": 1, "probe_batches": 2, "sample_tokens": 0, "lr": 1e-30, "min_lr": 0.0}
    found = []
    for attempt, micro_batch in ((31, 4), (32, 1)):
        with world.opened(world.spec(attempt, training=training, micro_batch=micro_batch)) as (trainer, parent):
            trainer.train_segment(1)
        found += [record.probe_loss for record in parent.records]
    assert found[0] == found[1]


def test_a_step_whose_gradient_overflows_in_fp16_is_a_record_too(world: TrainingWorld) -> None:
    training = {"precision": "fp16", "kernels": "stock", "probe_every_steps": 0}
    with world.opened(world.spec(33, training=training)) as (trainer, parent):
        trainer._state.model.wte.weight.register_hook(lambda gradient: gradient * float("inf"))
        trainer.train_segment(2)
    read = read_step_records(world.store, "runs/run-33", [AttemptRecord(started=started(33), started_at=NOON)])
    assert [record.step for record in read] == [1, 2] == [record.step for record in parent.records]
    assert [record.grad_norm for record in read] == [None, None]
    assert read[0].loss_scale == 2 * read[1].loss_scale > 0


def test_a_step_says_when_it_was_how_far_into_the_data_and_on_how_many_processes(world: TrainingWorld) -> None:
    before = datetime.now(UTC)
    with world.opened(world.spec(34)) as (trainer, parent):
        trainer.train_segment(2)
    second, windows = parent.records[1], trainer._data.inputs.windows.window_count
    assert before <= second.at <= datetime.now(UTC)
    assert (second.tokens, second.world_size) == (2 * TRAINING["global_batch"] * MODEL["block_size"], 1)
    assert parent.records[0].rss_bytes > 2**20 and parent.records[0].disk_free_bytes > 0
    assert second.epoch == 2 * TRAINING["global_batch"] / windows and 0 <= second.data_seconds < second.seconds + 1


def test_tokens_and_device_time_count_from_the_start_of_the_attempt(world: TrainingWorld) -> None:
    first = world.train(world.spec(), 2)
    again = world.train(world.spec(2, resume=first.staged), 5)
    events = again.parent.all(StepDone)
    assert [event.tokens for event in events] == [STEP_TOKENS, 2 * STEP_TOKENS, 3 * STEP_TOKENS]
    seconds = [event.gpu_seconds for event in events]
    assert seconds == sorted(seconds) and seconds[0] > 0.0


@pytest.mark.parametrize(("patience", "rise"), [(2, 1e-6), (3, 1e-6), (2, 0.01)])
def test_a_diverged_run_blames_exactly_the_windows_of_the_spike(
    world: TrainingWorld, patience: int, rise: float
) -> None:
    rule = DivergenceConfig(patience_steps=patience, rise_nats=rise)
    training = {"steps": 200, "lr": 1e-9, "min_lr": 0.0, "global_batch": 2}
    with world.opened(world.spec(training=training, micro_batch=2, divergence=rule)) as (trainer, parent):
        with pytest.raises(LossExploded) as exploded:
            trainer.train_segment(200)
        order = trainer._data.inputs.order
    error, losses = exploded.value, parent.losses
    last = next(
        step
        for step in range(64 + patience, 201)
        if min(losses[step - patience : step]) > median(losses[step - 64 - patience : step - patience]) + rise
    )
    blamed = np.concatenate([order.windows_of(step) for step in range(last - patience, last)])
    assert (error.step, error.spike_step) == (last, last - patience + 1)
    assert sorted(error.windows) == sorted(blamed.tolist())


def test_a_checkpoint_says_at_which_rate_it_was_reached(world: TrainingWorld) -> None:
    trained = world.train(world.spec(), 3)
    document = load_checkpoint(world.store, reference_of(trained.staged)).trainer
    rates = [record.lr for record in trained.parent.records]
    assert (document.step, document.learning_rate, document.cursor) == (3, rates[2], 3 * TRAINING["global_batch"])
    assert len(set(rates)) == 3


def test_a_segment_that_ends_during_an_upload_leaves_the_state_as_it_would_be(world: TrainingWorld) -> None:
    untouched = world.train(world.spec(), 6)
    with world.opened(world.spec(2)) as (trainer, parent):
        may_upload = threading.Event()
        trainer._reporter.publish = may_upload.wait  # type: ignore[assignment]
        trainer.train_segment(2, 0.01)
        trainer.train_segment(4, 0.01)
        may_upload.set()
        trainer.train_segment(6)
        trainer._staging.wait()
    assert [event.behind for event in parent.all(SegmentDone)] == [None, 2, None]
    assert [staged.step for staged in parent.all(StagedCheckpoint)] == [2, 6]
    assert parent.last(StagedCheckpoint).state_sha256 == untouched.staged.state_sha256


def test_a_segment_waits_for_an_upload_that_is_soon_over(world: TrainingWorld) -> None:
    with world.opened(world.spec()) as (trainer, parent):
        trainer.train_segment(2, 240.0)
        trainer.train_segment(4, 240.0)
        trainer._staging.wait()
    assert [staged.step for staged in parent.all(StagedCheckpoint)] == [2, 4]


def test_device_time_counts_every_device(world: TrainingWorld) -> None:
    parent: Any = ParentEnd()
    place = Place(device=torch.device("cpu"), ranks=Ranks(rank=0, size=4))
    reporter = StepReporter(world.spec(devices=4), world.store, "runs/many", parent, place)
    reporter._started -= 100.0
    reporter.report_segment(step=5, stopped=False)
    reporter._log._file.close()
    (done,) = parent.all(SegmentDone)
    assert 400.0 <= done.gpu_seconds <= 4 * (time.monotonic() - reporter._started)


@pytest.mark.parametrize(
    "error",
    [
        BadBatch(step=3, windows=(5, 8), why="by the test"),
        LossExploded(step=9, spike_step=7, level=5.0, baseline=2.0, windows=(1, 2)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_reaches_the_parent_with_its_step_and_windows(
    error: BadBatch | LossExploded, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, codes = ParentEnd(), list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    exit_on_error(parent, error)  # type: ignore[arg-type]
    report = parent.last(ExceptionReport)
    assert (report.exception, report.message, codes) == (type(error).__name__, str(error), [1])
    assert report.kind is kind_of(error)
    assert (report.step, report.windows) == (error.step, error.windows)
    assert report.spike_step == getattr(error, "spike_step", None)


class Reported(Exception):
    """Stands for the report of an error, after which a trainer exits with 1."""


def test_a_network_that_exits_as_if_all_were_done_ends_its_trainer_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Exits:
        def read_spec(self) -> None:
            raise SystemExit(0)

    def report(channel: Any, error: BaseException) -> None:
        raise Reported from error

    monkeypatch.setattr(trainer.signal, "signal", lambda *_: None)
    monkeypatch.setattr(trainer.faulthandler, "register", lambda *_: None)
    monkeypatch.setattr(trainer, "open_channel", Exits)
    monkeypatch.setattr(trainer, "exit_on_error", report)
    with pytest.raises(Reported):
        trainer.main()
