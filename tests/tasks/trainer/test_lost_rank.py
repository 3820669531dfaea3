"""A rank that is killed does not end an attempt: the others go on with the same bits, and nothing restarts."""

import socket
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest

from cairn.model.training.membership import Members
from cairn.tasks.errors import TaskError
from cairn.tasks.machine.arithmetic import arithmetic_of
from cairn.tasks.trainer import rank_values, trainer_protocol
from cairn.tasks.trainer.launched_ranks import GO_ON, LATE, LaunchedRanks
from tests.processes.waiting import patience_seconds
from tests.programs.chaos.rank_campaign import PHASES, find_problems, phase_table
from tests.programs.chaos.rank_run import STEPS, Ended, RankRun
from tests.programs.chaos.rank_victim import NAMES

SLOW = 0.2
"""Seconds of a step in which a rank that is started has a chance to join."""


def poll_soon(seconds: float) -> None:
    """Sleep a twentieth of what a launcher wants to, whose patience is counted in polls."""
    time.sleep(seconds / 20)


def problems(ended: Ended, undisturbed: Ended) -> list[str]:
    """What does not hold, on a machine of any load: how soon ranks go on is what the campaign measures."""
    return find_problems(ended, undisturbed, bound_seconds=patience_seconds())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RankRun:
    return RankRun(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def undisturbed(runs: RankRun) -> Ended:
    return runs.run(1)


@pytest.fixture(scope="module")
def struck(runs: RankRun) -> Ended:
    """A run of four ranks on two machines, of which one is killed in its second step; another one joins."""
    return runs.run(4, "2:after-parts:2", machines=2, step_seconds=SLOW)


@pytest.fixture(scope="module")
def worn(runs: RankRun) -> Ended:
    """A run of four ranks: one dies while it writes, one while the others meet, one while it writes the end."""
    return runs.run(4, "1:stage:2,3:meet:1,2:stage:4")


def test_three_of_four_ranks_go_on_with_the_bits_of_a_run_that_nobody_touched(
    struck: Ended, undisturbed: Ended
) -> None:
    assert problems(struck, undisturbed) == []
    assert struck.deaths == ("after-parts",)
    change = struck.changes[0]
    assert (change.step, change.lost, change.remaining, change.charged) == (2, (2,), (0, 1, 3), "lost")
    assert change.detail == "rank 2 lost after step 1; 0, 1, 3 go on with the same bits"


def test_a_rank_that_is_started_in_the_place_of_a_lost_one_takes_over_the_state_of_the_first(struck: Ended) -> None:
    _, joined = struck.changes
    assert (joined.lost, joined.joined, joined.remaining, joined.charged) == ((), (4,), (0, 1, 3, 4), None)
    assert joined.hosts == (socket.gethostname(),)
    state = f"rank 4 joined with the others' state ({socket.gethostname()}) after step {joined.step - 1}"
    assert joined.detail == f"{state}; 0, 1, 3, 4 go on with the same bits"


def test_ranks_lost_one_after_the_other_even_while_the_rest_meets_leave_one_that_ends_the_run(
    worn: Ended, undisturbed: Ended
) -> None:
    assert problems(worn, undisturbed) == []
    assert [change.lost for change in worn.changes if change.lost] == [(1, 3), (2,)]


def test_a_checkpoint_whose_writer_is_lost_is_dropped_and_the_last_one_is_written_again(worn: Ended) -> None:
    assert worn.dropped == (6, STEPS) and set(worn.digests) == {3, 9, STEPS}


@pytest.mark.slow  # quick witness: test_a_rank_that_is_late_with_its_part_of_a_checkpoint_is_killed
def test_a_rank_that_hangs_while_the_last_checkpoint_is_written_is_killed_and_it_is_written_without_it(
    runs: RankRun, undisturbed: Ended
) -> None:
    ended = runs.run(4, "3:suspend-stage:4")
    assert problems(ended, undisturbed) == []
    assert ended.dropped == (STEPS,) and [change.lost for change in ended.changes if change.lost] == [(3,)]


@pytest.mark.slow  # quick witness: test_a_launcher_that_is_asked_kills_the_ranks_that_hang_unless_the_first_does
def test_a_rank_that_hangs_is_killed_alone_and_is_found_by_what_the_others_wait_for(
    runs: RankRun, undisturbed: Ended
) -> None:
    ended = runs.run(4, "3:suspend-forward:9")
    assert problems(ended, undisturbed) == []
    assert [change.lost for change in ended.changes if change.lost] == [(3,)]


def test_a_rank_joins_only_those_that_compute_as_it_does(runs: RankRun) -> None:
    own = arithmetic_of("cpu", runs.world.spec(training=runs.training).training.arithmetic).digest
    with runs.world.opened(runs.world.spec(99)) as (trainer, _):
        trainer._require_arithmetic(own)
        trainer._require_arithmetic("0123456789ab+")
        with pytest.raises(TaskError, match="computes other bits"):
            trainer._require_arithmetic("0123456789ab")


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param("2:flags:3,4:hand-over:1,3:hand-over:2", id="the one that joins, and one that was there, at once"),
        pytest.param(
            "2:flags:3,4:after-hand-over:1", id="the one that joins, once it has the state", marks=pytest.mark.slow
        ),  # quick witness: the first
        pytest.param(
            "2:flags:3,4:forward:1,1:meet:3", id="one that has joined, another while they meet", marks=pytest.mark.slow
        ),  # quick witness: the first
    ],
)
def test_ranks_that_die_while_another_joins_take_no_bit_along(runs: RankRun, undisturbed: Ended, kills: str) -> None:
    ended = runs.run(4, kills, step_seconds=SLOW)
    assert problems(ended, undisturbed) == []


@pytest.mark.slow  # quick witness: test_a_launcher_that_is_gone_takes_its_ranks_along_and_the_parent_learns_which
def test_ranks_of_two_machines_outlive_one_rank_and_a_whole_machine_and_another_machine_joins(
    runs: RankRun, undisturbed: Ended
) -> None:
    ended = runs.run(4, "1:after-parts:2,3:machine-forward:7", machines=2, step_seconds=SLOW)
    assert problems(ended, undisturbed) == []
    assert {2, 3} <= {rank for change in ended.changes for rank in change.lost}
    assert any(change.joined for change in ended.changes)


@pytest.mark.slow  # quick witness: test_a_launcher_that_is_asked_kills_the_ranks_that_hang_unless_the_first_does
def test_a_rank_that_hangs_on_another_machine_is_killed_alone(runs: RankRun, undisturbed: Ended) -> None:
    ended = runs.run(4, "3:suspend-forward:9", machines=2)
    assert problems(ended, undisturbed) == []
    assert ended.changes[0].lost == (3,)


def test_the_table_of_the_campaign_has_a_phase_for_every_place_where_a_rank_is_struck_and_names_empty_ones() -> None:
    assert sorted(place for places in PHASES.values() for place in places) == sorted(NAMES)
    table = phase_table(Counter({name: 1 for name in NAMES} | {"machine-forward": 2, "suspend-parts": 3}))
    rows = [line.rsplit(maxsplit=3) for line in table.splitlines()]
    assert ["forward", "2", "0", "2"] in rows and ["exchange: gradients", "4", "3", "0"] in rows
    assert "never struck: forward (stopped), backward (stopped), backward (machine), " in table


class Launched:
    """Ranks that are small programs, as a launcher has them: the first is there, and those that join just wait."""

    def __init__(self, folder: Path, *programs: str, said: bool = True) -> None:
        self.values, self.programs = rank_values.FolderValues(folder / "store"), list(programs)
        if said:
            self.values[GO_ON] = b"1"
        self.marks = rank_values.WaitingMarks(folder / "marks")
        self.started = dict[int, "subprocess.Popen[bytes]"]()
        self.reports = list[trainer_protocol.RanksOutlived]()
        self.ranks = LaunchedRanks(self.values, self.marks, self.start, size=len(programs), report=self.reports.append)
        self.ranks.start(range(len(programs)))

    def start(self, rank: int, local: int) -> "subprocess.Popen[bytes]":
        program = self.programs[rank] if rank < len(self.programs) else "exec sleep 1000"
        self.started[rank] = process = subprocess.Popen(["sh", "-c", program])
        return process

    def members(self) -> tuple[int, ...]:
        return rank_values.read_members(self.values).ranks


STAYS, KILLED = "exec sleep 1000", "kill -9 $$"


@pytest.mark.parametrize(
    ("programs", "said", "left"),
    [
        pytest.param(("sleep 0.5", KILLED), True, (0,), id="a killed rank that is not the first is outlived"),
        pytest.param((KILLED, STAYS), True, (), id="the first has the pipe to the parent"),
        pytest.param((STAYS, KILLED), False, (), id="its state is not loaded, or it is sharded"),
        pytest.param((STAYS, "exit 1"), True, (), id="an error is the attempt's"),
        pytest.param((STAYS, "kill -11 $$"), True, (), id="so is a crash"),
    ],
)
def test_only_a_killed_rank_that_is_not_the_first_is_outlived_and_only_where_ranks_said_so(
    tmp_path: Path, programs: tuple[str, str], said: bool, left: tuple[int, ...]
) -> None:
    seen = list[tuple[int, ...]]()
    launched = Launched(tmp_path, *programs, said=said)
    ended = launched.ranks.wait(sleep=lambda seconds: seen.append(launched.members()) or poll_soon(seconds))
    assert (ended is None) == bool(left)
    assert (left or ()) in seen


def test_a_rank_that_was_outlived_is_not_the_cause_of_a_later_end(tmp_path: Path) -> None:
    def end_of(first: str) -> trainer_protocol.RankEnded | None:
        return Launched(tmp_path / first.replace(" ", "-"), first, KILLED).ranks.wait(sleep=poll_soon)

    assert end_of("sleep 0.3; exit 0") is None
    assert end_of("sleep 0.3; exit 3") == trainer_protocol.RankEnded(rank=0, exit_code=3)
    assert end_of("sleep 0.3; exit 77") == trainer_protocol.RankEnded(rank=1, exit_code=-9), "it could not go on"


def test_a_rank_is_started_in_the_place_of_a_lost_one_under_a_number_that_nobody_had(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "sleep 0.5", KILLED, "sleep 0.5")
    assert launched.ranks.wait() is None, "the first rank has done everything"
    assert sorted(launched.started) == [0, 1, 2, 3]
    assert launched.started[3].returncode == -9, "nobody let it in, so it does not keep the others waiting"


def test_a_rank_that_ends_before_it_was_let_in_ends_nobody_and_is_not_replaced(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "sleep 1", KILLED)
    launched.programs += ["exit 1"]
    assert launched.ranks.wait() is None
    assert sorted(launched.started) == [0, 1, 2]


def test_a_rank_that_is_late_with_its_part_of_a_checkpoint_is_killed(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "sleep 0.5", STAYS)
    rank_values.set_value(launched.values, LATE, b"[1]")
    assert launched.ranks.wait() is None
    assert launched.started[1].returncode == -9 and sorted(launched.started) == [0, 1, 2], "another one joins"


@pytest.mark.parametrize(
    ("programs", "has_finished"),
    [
        pytest.param((STAYS, "exit 0"), True, id="nothing is left to do"),
        pytest.param((STAYS, KILLED), False, id="it was killed, and so was the one in its place"),
    ],
)
def test_a_launcher_knows_whether_its_ranks_have_finished_or_were_outlived(
    tmp_path: Path, programs: tuple[str, str], has_finished: bool
) -> None:
    values = rank_values.FolderValues(tmp_path / "store")
    rank_values.change_members(values, lambda _: Members(ranks=(0, 1)))
    values[GO_ON] = b"1"
    marks, program = rank_values.WaitingMarks(tmp_path / "marks"), iter((programs[1], "exit 1"))
    other = LaunchedRanks(values, marks, lambda *_: subprocess.Popen(["sh", "-c", next(program)]), size=2, launcher=1)
    other.start([1])
    assert other.wait() is None
    assert other.has_finished() == has_finished


def test_where_no_process_can_be_started_the_others_go_on_as_they_are(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "sleep 0.5", KILLED)
    launched.programs = []

    def start(rank: int, local: int) -> "subprocess.Popen[bytes]":
        raise BlockingIOError("Resource temporarily unavailable")

    launched.ranks._start = start
    assert launched.ranks.wait() is None


def test_where_every_rank_that_joins_is_killed_no_more_are_started_some_time(tmp_path: Path) -> None:
    launched = Launched(tmp_path, STAYS, KILLED)

    def let_in(seconds: float) -> None:
        for rank in launched.started.keys() - {0, 1}:
            with suppress(ProcessLookupError):
                rank_values.change_members(launched.values, lambda members, rank=rank: members.with_waiting(rank))
                rank_values.change_members(launched.values, lambda members: members.admitted(members.admissions + 1))
                launched.started[rank].kill()
        if len(launched.started) == 10 and launched.started[9].poll() is not None:
            launched.started[0].terminate()

    assert launched.ranks.wait(sleep=let_in) is not None
    assert len(launched.started) == 2 + 8


@pytest.mark.parametrize(("waiting", "lost"), [((0,), (1,)), ((1,), ()), ((), ())])
def test_a_launcher_that_is_asked_kills_the_ranks_that_hang_unless_the_first_does(
    tmp_path: Path, waiting: tuple[int, ...], lost: tuple[int, ...]
) -> None:
    launched = Launched(tmp_path, STAYS, STAYS)
    for rank in waiting:
        launched.marks.set(rank, True)
    launched.ranks.is_hung.set()

    def end_then(seconds: float) -> None:
        if launched.reports:
            launched.started[0].terminate()

    launched.ranks.wait(sleep=end_then)
    assert launched.reports == [trainer_protocol.RanksOutlived(ranks=lost)]


@pytest.mark.parametrize("own", [pytest.param((2, 3), id="its ranks"), pytest.param((), id="or none, lost before")])
def test_a_launcher_that_is_gone_takes_its_ranks_along_and_the_parent_learns_which(
    tmp_path: Path, own: tuple[int, ...]
) -> None:
    gone = SimpleQueue[str]()
    values, reports = rank_values.MemoryValues(), list[trainer_protocol.RanksOutlived]()
    rank_values.set_value(values, GO_ON, b"1")
    first = subprocess.Popen(["sleep", "1000"])
    ranks = LaunchedRanks(
        values, rank_values.WaitingMarks(tmp_path / "marks"), lambda *_: first, size=4, gone=gone, report=reports.append
    )
    ranks.start([0])
    rank_values.set_value(values, "launched/1", msgspec.json.encode(own))
    for name in ("2", "launcher-1"):  # a rank's connection says nothing that its launcher does not
        gone.put(name)
    ranks.wait(sleep=lambda seconds: first.kill())
    assert reports == [trainer_protocol.RanksOutlived(ranks=own, machine=1)]
    assert rank_values.read_members(values).ranks == ()
