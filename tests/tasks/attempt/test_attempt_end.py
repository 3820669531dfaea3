"""How an attempt ends in the log: what later attempts must know comes first, the receipt says what was decided."""

from pathlib import Path
from typing import Any

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.storage.errors import Fenced
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.step_log import Heartbeat
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.attempt.attempt_entries import AttemptOver, DataOrigin, end_attempt
from cairn.tasks.configuration.settings import BudgetsConfig
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.policy.failures import ErrorKind, Evidence, ExceptionReport
from tests.entries import writer
from tests.flipped_bit import flip_file
from tests.storage.builders import claim, commit, open_run, run_log, stage

BYTES = DataConfig(sources=("a.txt",), tokenizer="bytes")
PARAGRAPHS = [f"Paragraph {number} speaks of stone {number * number % 97} on the way up." for number in range(60)]


class Scene:
    """A run with commits at steps 5 and 10, an open attempt, and real data."""

    def __init__(self, folder: Path) -> None:
        (folder / "a.txt").write_text("\n\n".join(PARAGRAPHS))
        self.folder, self.store = folder, LocalStore(folder / "store")
        self.snapshot_id = build_snapshot(self.store, BYTES, folder).snapshot_id
        self.log: RunLog = open_run(self.store)
        claim(self.log)
        for step in (5, 10):
            commit(self.log, stage(self.store, step=step, attempt=1))

    @property
    def shard(self) -> Path:
        return next((self.folder / "store" / "data" / self.snapshot_id).glob("train-*.arrow"))

    def end(self, *, budgets: BudgetsConfig | None = None, **evidence: Any) -> Any:
        origin = DataOrigin(
            snapshot_id=self.snapshot_id,
            data=BYTES,
            base_dir=self.folder,
            cache_dir=self.folder / "cache",
            work_dir=self.folder / "work",
        )
        number = self.log.state.latest_attempt
        last = Heartbeat(attempt=number, beat=1, step=12, train_loss=None, tokens=100, gpu_seconds=9.0)
        over = AttemptOver(attempt=number, evidence=Evidence(**evidence), last=last)
        settings = budgets or BudgetsConfig()
        return end_attempt(self.log, over, limits=settings, origin=origin, writer=writer(over.attempt))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def words(kind: ErrorKind, **more: Any) -> ExceptionReport:
    return ExceptionReport(kind=kind, exception="E", message="m", traceback=(), **more)


def test_guilty_samples_are_quarantined_before_the_receipt_is_written(scene: Scene) -> None:
    ended = scene.end(last_words=words(ErrorKind.BAD_DATA, step=13, windows=(3, 1)))
    assert (ended.reason, ended.decision.action, ended.decision.changed) == (
        "bad-data",
        "resume",
        "2 sample(s) quarantined",
    )
    assert scene.log.state.quarantined_windows == {1, 3}
    assert [entry.kind for entry in scene.log.read_entries()][-2:] == ["data-quarantined", "attempt-ended"]


def test_more_guilty_samples_than_the_budget_allows_are_not_quarantined_and_the_run_stops(scene: Scene) -> None:
    budgets = BudgetsConfig.model_validate({"bad-data": {"retries": 5, "samples": 1}})
    ended = scene.end(budgets=budgets, last_words=words(ErrorKind.BAD_DATA, step=13, windows=(3, 1)))
    assert ended.decision.action == "stop"
    assert "raise budgets.bad-data.samples" in ended.decision.reason
    assert scene.log.state.quarantined_windows == frozenset()


def test_a_damaged_shard_is_made_anew_byte_for_byte_and_nothing_is_quarantined(scene: Scene) -> None:
    before = scene.shard.read_bytes()
    flip_file(scene.shard)
    ended = scene.end(last_words=words(ErrorKind.BAD_DATA, step=13, windows=(3,)))
    assert scene.shard.read_bytes() == before
    assert (ended.decision.action, scene.log.state.quarantines) == ("resume", ())
    assert "rebuilt" in ended.decision.changed


def test_a_damaged_shard_whose_source_is_gone_stops_the_run_and_says_so(scene: Scene) -> None:
    flip_file(scene.shard)
    (scene.folder / "a.txt").unlink()
    ended = scene.end(last_words=words(ErrorKind.BAD_DATA, step=13, windows=(3,)))
    assert ended.decision.action == "stop"
    assert "its sources are not available" in ended.detail


def test_a_damaged_shard_whose_source_has_changed_is_left_as_it_is(scene: Scene) -> None:
    flip_file(scene.shard)
    damaged = scene.shard.read_bytes()
    (scene.folder / "a.txt").write_text("\n\n".join([*PARAGRAPHS, "One more."] * 2))
    ended = scene.end(last_words=words(ErrorKind.BAD_DATA, step=13, windows=(3,)))
    assert (ended.decision.action, scene.shard.read_bytes()) == ("stop", damaged)


def test_a_spike_is_gone_back_behind_and_its_data_left_out(scene: Scene) -> None:
    ended = scene.end(last_words=words(ErrorKind.DIVERGED, step=12, spike_step=8, windows=(4, 5)))
    state = scene.log.state
    assert (ended.reason, ended.decision.action) == ("diverged", "resume")
    assert [record.committed.step for record in state.readable] == [5]
    assert state.quarantined_windows == {4, 5}


def test_an_only_checkpoint_is_never_given_up_for_a_spike(scene: Scene) -> None:
    scene.end(last_words=words(ErrorKind.DIVERGED, step=12, spike_step=2, windows=(4,)))
    assert [record.committed.step for record in scene.log.state.readable] == [5]


def test_ending_once_more_after_an_unknown_outcome_changes_nothing(scene: Scene) -> None:
    first = scene.end(last_words=words(ErrorKind.BAD_DATA, step=13, windows=(3, 1)))
    before = scene.log.seq
    assert scene.end(last_words=words(ErrorKind.BAD_DATA, step=13, windows=(3, 1))) == first
    assert scene.log.seq == before


def test_a_receipt_for_an_attempt_that_somebody_else_ended_is_refused(scene: Scene) -> None:
    claim(run_log(scene.store))
    with pytest.raises(Fenced, match="was ended by another process"):
        scene.end(exit_code=-9)


def test_the_evidence_is_in_the_receipt(scene: Scene) -> None:
    ended = scene.end(exit_code=-9, rss_bytes=123, stderr_tail=("last line",))
    assert (ended.evidence["exit_code"], ended.evidence["rss_bytes"], ended.stderr_tail) == (-9, 123, ("last line",))
