"""A rank that is killed does not end an attempt: the others go on with the same bits, and nothing restarts."""

import subprocess
from pathlib import Path

import pytest

from cairn.tasks.trainer import rank_values, trainer_protocol
from cairn.tasks.trainer.trainer_group import GO_ON, Survival, watch
from tests.programs.chaos.rank_campaign import find_problems
from tests.programs.chaos.rank_run import STEPS, Ended, RankRun


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RankRun:
    return RankRun(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def undisturbed(runs: RankRun) -> Ended:
    return runs.run(1)


def test_three_of_four_ranks_go_on_with_the_bits_of_a_run_that_nobody_touched(
    runs: RankRun, undisturbed: Ended
) -> None:
    ended = runs.run(4, "2:after-parts:5")
    assert find_problems(ended, undisturbed) == []
    assert ended.deaths == ("after-parts",)
    (change,) = ended.changes
    assert (change.step, change.lost, change.remaining, change.charged) == (5, (2,), (0, 1, 3), "lost")
    assert change.detail == "rank 2 lost after step 4; 0, 1, 3 go on with the same bits"


def test_ranks_lost_one_after_the_other_even_while_the_rest_meets_leave_one_that_ends_the_run(
    runs: RankRun, undisturbed: Ended
) -> None:
    ended = runs.run(4, "1:losses:4,3:meet:1,2:after-update:9")
    assert find_problems(ended, undisturbed) == []
    assert [change.remaining for change in ended.changes] == [(0, 2), (0,)]


def test_a_checkpoint_whose_writer_is_lost_is_dropped_and_the_last_one_is_written_again(
    runs: RankRun, undisturbed: Ended
) -> None:
    ended = runs.run(4, "1:stage:2,3:stage:4")
    assert find_problems(ended, undisturbed) == []
    assert ended.dropped == (6, STEPS) and set(ended.digests) == {3, 9, STEPS}


def test_a_rank_that_hangs_is_killed_alone_and_is_found_by_what_the_others_wait_for(
    runs: RankRun, undisturbed: Ended
) -> None:
    ended = runs.run(4, "3:suspend-forward:9")
    assert find_problems(ended, undisturbed) == []
    assert [change.lost for change in ended.changes] == [(3,)]


def outlives(folder: Path, rank: int, code: int, *, said: bool = True) -> bool:
    values = rank_values.FolderValues(folder)
    if said:
        values[GO_ON] = b"1"
    outlived = Survival(values, range(4)).outlives(trainer_protocol.RankEnded(rank=rank, exit_code=code))
    left = tuple(other for other in range(4) if other != rank) if outlived else ()
    assert rank_values.read_members(values) == rank_values.Members(changes=1, ranks=left)
    return outlived


def test_only_a_killed_rank_that_is_not_the_first_is_outlived_and_only_where_ranks_said_so(tmp_path: Path) -> None:
    assert outlives(tmp_path / "a", 2, -9)
    assert not outlives(tmp_path / "b", 0, -9), "it has the pipe to the parent"
    assert not outlives(tmp_path / "c", 2, -9, said=False), "its state is not loaded, or it is sharded"
    assert not outlives(tmp_path / "d", 2, 1), "an error is the attempt's"
    assert not outlives(tmp_path / "e", 2, -11), "so is a crash"


def test_a_rank_that_was_outlived_is_not_the_cause_of_a_later_end(tmp_path: Path) -> None:
    def end_of(second: str) -> trainer_protocol.RankEnded | None:
        values = rank_values.FolderValues(tmp_path / second)
        values[GO_ON] = b"1"
        first = subprocess.Popen(["sh", "-c", "kill -9 $$"])
        first.wait()
        ranks = {0: subprocess.Popen(["sh", "-c", second]), 1: first}
        return watch(ranks, Survival(values, range(2)))

    assert end_of("sleep 0.3; exit 0") is None
    assert end_of("sleep 0.3; exit 3") == trainer_protocol.RankEnded(rank=0, exit_code=3)
    assert end_of("sleep 0.3; exit 77") == trainer_protocol.RankEnded(rank=1, exit_code=-9), "it could not go on"


def test_a_rank_that_is_done_is_not_missed(tmp_path: Path) -> None:
    survival = Survival(values := rank_values.FolderValues(tmp_path), range(2))
    assert survival.outlives(trainer_protocol.RankEnded(rank=0, exit_code=0))
    assert rank_values.read_members(values).ranks == (), "who waits for it may go"
    assert survival.outlives(trainer_protocol.RankEnded(rank=1, exit_code=77))
