"""`cairn fork`: what a fork begins with, may change and records of the data before it; it trains on from there."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cairn.model.configuration.data import TrainedBefore
from cairn.operations.person_decisions import fork_run
from cairn.reports.plots.run_curves import gather_curves
from cairn.reports.queries.run_lookup import configuration_of, find_checkpoint, find_run, tokens_at
from cairn.storage.checkpoints.checkpoint import commit_checkpoint
from cairn.storage.checkpoints.resume_point import new_pin, newest_verified, pin_checkpoint
from cairn.storage.errors import NothingReadable
from cairn.storage.logs.log_entry import ForkOrigin, this_writer
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.snapshots.data_snapshot import read_manifest
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.settings import CheckpointConfig
from cairn.tasks.configuration.stored_configuration import check_drift
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.errors import ConfigDrift, InvalidConfiguration
from cairn.tasks.machine.placement import library_versions, this_placement
from cairn.tasks.policy.run_watch import Life, Observed, WatchAction, decide_watch
from cairn.tasks.trainer.trainer_protocol import trained_before
from tests import entries
from tests.cairn.trained_run import TrainedRun
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun
from tests.tasks.trainer_in_process import TrainingWorld, reference_of
from tests.writing_run import RUN, WritingRun, configuration, open_writing_run

POLICY = CheckpointConfig(keep_last=1, keep_best=0)
FORK = "twin"


@pytest.fixture
def parent(store: LocalStore, tmp_path: Path) -> WritingRun:
    """A run of 40 steps that has committed steps 10 and 20 and goes on."""
    run = open_writing_run(store, tmp_path)
    run.start()
    for step in (10, 20):
        run.commit(step)
    return run


def fork(parent: WritingRun, *overrides: str, reference: str | None = None) -> RunState:
    found = find_checkpoint(parent.log.store, reference or f"{parent.log.run_id}@10")
    fork_run(found, FORK, overrides, {}, Path.cwd())
    return RunLog(parent.log.store, FORK).refresh()


def refusal(parent: WritingRun, *overrides: str, reference: str | None = None) -> str:
    with pytest.raises(InvalidConfiguration) as caught:
        fork(parent, *overrides, reference=reference)
    assert RunLog(parent.log.store, FORK).refresh().opened is None and not parent.log.refresh().pins
    return str(caught.value)


def quarantine(parent: WritingRun) -> None:
    parent.log.append(lambda state: entries.spoiled(3, 5), writer=this_writer(attempt=1))


def kept_steps(parent: WritingRun) -> list[int]:
    sweep_run(parent.log, POLICY, "s" * 64)
    return [record.committed.step for record in parent.log.refresh().live_checkpoints]


@pytest.mark.parametrize("owner", Life)
def test_a_fork_that_nobody_has_started_is_not_trained_by_a_watcher(parent: WritingRun, owner: Life) -> None:
    found = decide_watch(fork(parent), Observed(owner=owner, unchanged_since=0.0), 1e6)
    why = f"forked and never started; `cairn train --run-id {FORK}` starts it"
    assert (found.action, found.why) == (WatchAction.LEFT, why)


def test_a_fork_that_was_started_once_is_continued_as_any_run_is(parent: WritingRun) -> None:
    fork(parent)
    run = FabricatedRun(log=RunLog(parent.log.store, FORK), nodes_wanted=1)
    run.log.refresh()
    run.start()
    found = decide_watch(run.log.state, Observed(owner=Life.GONE, unchanged_since=0.0), 1e6)
    assert found.action is WatchAction.CONTINUED


def test_a_fork_begins_with_its_parents_checkpoint_and_configuration(parent: WritingRun) -> None:
    state = fork(parent)
    assert state.opened is not None and parent.log.state.opened is not None
    assert state.opened.config == parent.log.state.opened.config | {"training": state.opened.config["training"]}
    assert state.beginning == parent.log.state.checkpoints[0].committed.reference
    assert configuration_of(state).training.micro_batch == 2, "which trained the checkpoint"
    assert state.opened.data_snapshot == parent.log.state.opened.data_snapshot


def test_what_is_set_is_the_forks_own(parent: WritingRun) -> None:
    state = fork(parent, "training.steps=70", "training.lr=0.01", "checkpoint.every_steps=7")
    config = configuration_of(state)
    assert (config.training.steps, config.training.lr, config.checkpoint.every_steps) == (70, 0.01, 7)
    assert state.opened is not None and state.opened.total_steps == 70


REFUSED = {
    "model.n_layer=2": "model.n_layer = 2: the checkpoint's state has another shape; rule: ",
    "training.precision=bf16": "training.precision = 'bf16': ",
    "data.tokenizer=bpe:300": "data.tokenizer = 'bpe:300': ",
    "training.steps=10": "training.steps = 10: the checkpoint is of step 10 already; rule: ",
    "data.val_fraction=0.3": "data.val_fraction: other tokens need the text",
    "training.nothing=1": "training.nothing",
}


def test_what_the_state_cannot_go_on_with_is_refused_and_nothing_is_opened(parent: WritingRun) -> None:
    said = {override: refusal(parent, override) for override in REFUSED}
    assert [override for override, words in REFUSED.items() if words not in said[override]] == []


def test_a_run_that_exists_is_not_forked_over(parent: WritingRun) -> None:
    fork(parent)
    with pytest.raises(InvalidConfiguration, match="run twin exists"):
        fork(parent)


def test_other_text_is_tokenized_with_the_networks_own_tokenizer(
    parent: WritingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("stone upon stone " * 80)
    state = fork(parent, 'data.sources=["mine.txt"]')
    assert state.opened is not None and parent.log.state.opened is not None
    assert state.opened.data_snapshot != parent.log.state.opened.data_snapshot
    manifest = read_manifest(parent.log.store, state.opened.data_snapshot)
    assert manifest.tokenizer_sha256 == parent.manifest.tokenizer_sha256
    assert [source.name for source in manifest.sources] == ["mine.txt"]


def test_windows_that_the_parent_did_not_draw_are_not_drawn(parent: WritingRun) -> None:
    quarantine(parent)
    parent.end("bad-data")
    parent.start()
    parent.commit(30)
    assert fork(parent, reference=f"{parent.log.run_id}@30").quarantined_windows == {3, 5}


def test_windows_that_were_drawn_before_the_fork_are_drawn_again(parent: WritingRun) -> None:
    quarantine(parent)
    assert fork(parent).quarantined_windows == set()


def test_the_parents_checkpoint_is_kept_until_the_fork_has_as_many_as_it_keeps(parent: WritingRun) -> None:
    fork(parent, "checkpoint.keep_last=2")
    parent.commit(30)
    assert kept_steps(parent) == [10, 30]
    child = WritingRun(log=RunLog(parent.log.store, FORK), config=parent.config, manifest=parent.manifest)
    child.start()
    child.commit(12)
    child.commit(14)
    assert kept_steps(parent) == [10, 30], "its attempt was started with the three of its configuration"
    child.commit(16)
    assert kept_steps(parent) == [30]


def test_a_pin_for_a_fork_that_was_never_opened_ends_with_its_process(parent: WritingRun) -> None:
    reference = parent.log.state.checkpoints[0].committed.reference
    pin_checkpoint(parent.log, new_pin(reference, entries.gone_placement(), fork=FORK), writer=this_writer())
    assert kept_steps(parent) == [20]


def test_a_fork_whose_beginning_cannot_be_read_says_so(parent: WritingRun) -> None:
    state = fork(parent)
    assert state.beginning is not None
    parent.log.store.delete(f"{state.beginning.prefix}/manifest.json")
    with pytest.raises(NothingReadable, match="run twin begins with step 10 of run bard, which cannot be read"):
        newest_verified(RunLog(parent.log.store, FORK), writer=this_writer(), sleep=lambda seconds: None)


def test_more_steps_for_a_finished_run_name_the_fork(parent: WritingRun) -> None:
    opened = parent.log.state.opened
    longer = parent.config.model_copy(update={"training": parent.config.training.model_copy(update={"steps": 99})})
    assert opened is not None
    with pytest.raises(ConfigDrift, match=r"cairn fork bard NEW-RUN --set"):
        check_drift(opened.config, longer, run_id=opened.run_id)


def fork_trained(trained: WritingRun, run_id: str, *overrides: str, of: str = f"{RUN}@10") -> ForkOrigin:
    fork_run(find_checkpoint(trained.log.store, of), run_id, overrides, {}, Path.cwd())
    origin = RunLog(trained.log.store, run_id).refresh().origin
    assert origin is not None
    return origin


def counted(origin: ForkOrigin) -> tuple[int | None, int | None, tuple[int, ...]]:
    return origin.draws, origin.tokens, origin.component_draws


@pytest.fixture
def trained(store: LocalStore, tmp_path: Path) -> WritingRun:
    """A run that has drawn twenty windows of 32 tokens up to step 10."""
    run = open_writing_run(store, tmp_path)
    run.start()
    run.commit(10)
    return run


def test_the_origin_says_how_many_samples_and_tokens_lie_before_it(trained: WritingRun) -> None:
    assert counted(fork_trained(trained, "twin", "training.global_batch=4")) == (20, 640, (20,))


def test_a_fork_of_a_fork_adds_its_own_draws_to_its_parents(trained: WritingRun) -> None:
    fork_trained(trained, "twin", "training.global_batch=4")
    config = configuration(Path(trained.config.data.sources[0]).parent)
    training = config.training.model_copy(update={"global_batch": 4})
    child = WritingRun(
        log=RunLog(trained.log.store, "twin"),
        config=config.model_copy(update={"training": training}),
        manifest=trained.manifest,
    )
    child.start()
    child.commit(15)
    assert counted(fork_trained(trained, "third", of="twin@15")) == (40, 1280, (40,))


def test_of_data_that_is_new_nothing_is_drawn(
    trained: WritingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("stone upon stone " * 80)
    assert counted(fork_trained(trained, "twin", 'data.sources=["mine.txt"]')) == (20, 640, (0,))


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
        assert counted(fork_trained(run, name, change)) == (20, 640, (15, 5))


def test_an_origin_without_counts_says_nothing_of_what_lies_before_it(trained: WritingRun) -> None:
    origin = fork_trained(trained, "twin")
    older = ForkOrigin(run_id=RUN, checkpoint=origin.checkpoint, state_sha256=origin.state_sha256)
    assert trained_before(older) == trained_before(None) == TrainedBefore()


def test_a_trainer_with_another_batch_goes_on_with_its_parents_counters(tmp_path: Path) -> None:
    world = TrainingWorld(tmp_path)
    parent = world.train(world.spec(1), 4)
    before = TrainedBefore(step=4, draws=32, tokens=32 * 16, component_draws=(32,))
    spec = world.spec(2, resume=parent.staged, before=before, training={"global_batch": 4, "micro_batch": 4})
    child = world.train(spec, 6)
    again = world.train(spec.model_copy(update={"attempt": 3, "resume": reference_of(child.staged)}), 8)
    records = [*parent.parent.records, *child.parent.records, *again.parent.records]
    assert [record.tokens for record in records] == [16 * n for n in (8, 16, 24, 32, 36, 40, 44, 48)]
    epochs = [record.epoch or 0.0 for record in records]
    rises = [after - before for before, after in pairwise(epochs)]
    assert rises == pytest.approx([rises[0]] * 3 + [rises[0] / 2] * 4)
    assert int(again.tensors["cursor"]) == 48


def test_reports_count_a_forks_tokens_from_its_parents_on(trained: WritingRun) -> None:
    fork_trained(trained, "twin", "training.global_batch=4")
    fork_trained(trained, "same")
    twin, same = (find_run(trained.log.store, name) for name in ("twin", "same"))
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
