"""What a fork records of the data before it, and that its trainer goes on from there."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cairn.model.configuration.data import TrainedBefore
from cairn.operations.person_decisions import fork_run
from cairn.reports.plots.run_curves import gather_curves
from cairn.reports.queries.run_lookup import find_checkpoint, find_run, tokens_at
from cairn.storage.checkpoints.checkpoint import commit_checkpoint
from cairn.storage.logs.log_entry import ForkOrigin, this_writer
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.machine.placement import library_versions, this_placement
from cairn.tasks.trainer.trainer_protocol import trained_before
from tests import entries
from tests.cairn.trained_run import TrainedRun
from tests.commands import Cairn
from tests.tasks.trainer_in_process import TrainingWorld, reference_of
from tests.writing_run import RUN, WritingRun, configuration, open_writing_run


def fork(parent: WritingRun, run_id: str, *overrides: str, of: str = f"{RUN}@10") -> ForkOrigin:
    fork_run(find_checkpoint(parent.log.store, of), run_id, overrides, {}, Path.cwd())
    origin = RunLog(parent.log.store, run_id).refresh().origin
    assert origin is not None
    return origin


def counted(origin: ForkOrigin) -> tuple[int | None, int | None, tuple[int, ...]]:
    return origin.draws, origin.tokens, origin.component_draws


@pytest.fixture
def parent(store: LocalStore, tmp_path: Path) -> WritingRun:
    """A run that has drawn twenty windows of 32 tokens up to step 10."""
    run = open_writing_run(store, tmp_path)
    run.start()
    run.commit(10)
    return run


def test_the_origin_says_how_many_samples_and_tokens_lie_before_it(parent: WritingRun) -> None:
    assert counted(fork(parent, "twin", "training.global_batch=4")) == (20, 640, (20,))


def test_a_fork_of_a_fork_adds_its_own_draws_to_its_parents(parent: WritingRun) -> None:
    fork(parent, "twin", "training.global_batch=4")
    config = configuration(Path(parent.config.data.sources[0]).parent)
    training = config.training.model_copy(update={"global_batch": 4})
    child = WritingRun(
        log=RunLog(parent.log.store, "twin"),
        config=config.model_copy(update={"training": training}),
        manifest=parent.manifest,
    )
    child.start()
    child.commit(15)
    assert counted(fork(parent, "third", of="twin@15")) == (40, 1280, (40,))


def test_of_data_that_is_new_nothing_is_drawn(
    parent: WritingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("stone upon stone " * 80)
    assert counted(fork(parent, "twin", 'data.sources=["mine.txt"]')) == (20, 640, (0,))


def test_with_other_weights_or_stages_the_origin_counts_the_draws_of_each_source(
    store: LocalStore, tmp_path: Path
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} paragraph {number}" for number in range(60)))
    document: dict[str, Any] = configuration(tmp_path).document()
    sources = [str(tmp_path / f"{name}.txt") for name in "ab"]
    document["data"] |= {"sources": sources, "weights": [3.0, 1.0]}
    config = parse_configuration(document, overrides=(), environment={}, name="test")
    snapshot, log = build_snapshot(store, config.data, tmp_path), RunLog(store, RUN)
    body = entries.opened_with(config, RUN, snapshot.snapshot_id)
    log.append(lambda state: body, writer=this_writer())
    run = WritingRun(log=log, config=config, manifest=snapshot.manifest)
    run.start()
    run.commit(10)
    stages = "data.stages=[{step = 20, weights = [0, 1]}]"
    for name, change in (("twin", "data.weights=[1.0, 1.0]"), ("staged", stages)):
        assert counted(fork(run, name, change)) == (20, 640, (15, 5))


def test_an_origin_without_counts_says_nothing_of_what_lies_before_it(parent: WritingRun) -> None:
    origin = fork(parent, "twin")
    older = ForkOrigin(run_id=RUN, checkpoint=origin.checkpoint, state_sha256=origin.state_sha256)
    assert trained_before(older) == trained_before(None) == TrainedBefore()


def test_a_trainer_with_another_batch_goes_on_with_its_parents_counters(tmp_path: Path) -> None:
    world = TrainingWorld(tmp_path)
    parent = world.train(world.spec(1), 4)
    before = TrainedBefore(step=4, draws=32, tokens=32 * 16, component_draws=(32,))
    fork = world.spec(2, resume=parent.staged, before=before, training={"global_batch": 4, "micro_batch": 4})
    child = world.train(fork, 6)
    again = world.train(fork.model_copy(update={"attempt": 3, "resume": reference_of(child.staged)}), 8)
    records = [*parent.parent.records, *child.parent.records, *again.parent.records]
    assert [record.tokens for record in records] == [16 * n for n in (8, 16, 24, 32, 36, 40, 44, 48)]
    epochs = [record.epoch or 0.0 for record in records]
    rises = [after - before for before, after in pairwise(epochs)]
    assert rises == pytest.approx([rises[0]] * 3 + [rises[0] / 2] * 4)
    assert int(again.tensors["cursor"]) == 48


def test_reports_count_a_forks_tokens_from_its_parents_on(parent: WritingRun) -> None:
    fork(parent, "twin", "training.global_batch=4")
    fork(parent, "same")
    twin, same = (find_run(parent.log.store, name) for name in ("twin", "same"))
    assert [tokens_at(twin.state, step) for step in (10, 12)] == [640, 896]
    assert [tokens_at(same.state, step) for step in (10, 12)] == [640, 768]
    assert [gather_curves(log).tokens_per_step for log in (twin, same)] == [0, 64]


def test_a_segment_of_a_fork_with_another_batch_is_recomputed_to_the_same_bits(tmp_path: Path, cairn: Cairn) -> None:
    run = TrainedRun(tmp_path)
    run.attempt(4)
    settings = ("training.global_batch=4", "training.steps=8")
    found = find_checkpoint(run.world.store, f"{RUN}@4")
    opened = fork_run(found, "twin", settings, {}, tmp_path).opened
    log, training = RunLog(run.world.store, "twin"), {"global_batch": 4, "micro_batch": 4, "steps": 8}
    config = run.config.model_copy(update={"training": run.config.training.model_copy(update=training)})
    where = {"placement": this_placement(device="cpu", threads=1), "versions": library_versions()}
    entry = entries.started(1, config=config.document(), resumed_from=log.refresh().beginning, **where)
    log.append(lambda state: entry, writer=entries.writer())
    before = TrainedBefore(step=4, draws=32, tokens=512, component_draws=(32,))
    spec = run.world.spec(1, training=training, before=before).model_copy(
        update={"run_id": "twin", "resume": log.state.beginning}
    )
    staged = run.world.train(spec, 6).staged
    commit_checkpoint(log, staged, writer=entries.writer(1), tokens=6, gpu_seconds=0.1)
    log.append(
        lambda state: entries.ended(1, "lost", decision=entries.decided(action="resume"), arithmetic=None),
        writer=entries.writer(),
    )
    assert opened.forked_from is not None and opened.forked_from.draws == 32
    assert '"equal": 1' in cairn("replay", "twin", "--json").out
