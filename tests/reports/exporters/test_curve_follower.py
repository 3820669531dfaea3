from hypothesis import given
from hypothesis import strategies as st

from cairn.reports.exporters.curve_follower import CurveFollower
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import StepTail
from tests.entries import damaged
from tests.fabricated_run import HUMAN, fabricate
from tests.memory_store import MemoryStore
from tests.reports.exported_run import ExportedRun, interrupted_run


class Shown:
    """What somebody shows who does as he is told."""

    def __init__(self, run: ExportedRun, most_bytes: int = 10**6) -> None:
        self._follower = CurveFollower(StepTail(run.run.log.store, run.run.log.prefix, most_bytes=most_bytes))
        self.points: dict[int, float] = {}
        self.evaluated, self.ends, self.rewinds = list[int](), list[int](), list[int]()

    def catch_up(self, state: RunState) -> list[tuple[int, float]]:
        more = True
        while more:
            update = self._follower.follow(state)
            if update.rewind_to is not None:
                self.rewinds.append(update.rewind_to)
                self.points = {step: loss for step, loss in self.points.items() if step <= update.rewind_to}
            for point in update.steps:
                assert point.step not in self.points, "no step twice"
                self.points[point.step] = point.values["train/loss"]
            self.evaluated += [item.step for item in update.evaluations]
            self.ends += [ended.attempt for ended in update.ends]
            more = update.more
        return sorted(self.points.items())


def test_a_run_that_is_over_is_told_once_without_going_back() -> None:
    run = interrupted_run(MemoryStore("over"))
    shown = Shown(run)
    assert shown.catch_up(run.state) == run.curve() and shown.rewinds == []
    assert (shown.evaluated, shown.ends, len(shown.points)) == ([10, 20], [1], 20)
    assert shown.catch_up(run.state) == run.curve(), "nothing is told twice"


def test_steps_that_are_trained_again_are_taken_back_first() -> None:
    run = ExportedRun(run=fabricate(MemoryStore("again"), "bard"))
    shown = Shown(run)
    run.start()
    run.train(1, 10)
    run.run.commit(10)
    run.train(11, 14)
    assert len(shown.catch_up(run.state)) == 14
    run.die()
    run.start()
    shown.catch_up(run.state)
    assert shown.rewinds == [10]
    run.train(11, 16)
    assert shown.catch_up(run.state) == run.curve()
    assert shown.points[12] == 12.2, "of the second attempt"


def test_time_goes_on_within_an_attempt_by_what_its_steps_took() -> None:
    run = interrupted_run(MemoryStore("time"))
    follower = CurveFollower(StepTail(run.run.log.store, run.run.log.prefix))
    lines = follower.follow(run.state).steps
    started = run.state.attempts[0].started_at.timestamp()
    assert [timed.at_seconds - started for timed in lines[:3]] == [0.5, 1.0, 1.5]


def test_an_evaluation_of_what_was_trained_again_is_not_told() -> None:
    run = ExportedRun(run=fabricate(MemoryStore("evaluated"), "bard"))
    run.start()
    run.train(1, 10)
    lost = run.run.commit(10)
    run.run.evaluate(lost, loss=9.0)
    run.die()
    run.run.log.append(lambda state: damaged(lost, "it is damaged"), writer=HUMAN)
    run.start()
    run.train(1, 12)
    shown = Shown(run)
    assert shown.catch_up(run.state) == run.curve() and shown.evaluated == []


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 6)),
        st.just(("commit", 0)),
        st.just(("die", 0)),
        st.just(("look", 0)),
    ),
    max_size=25,
)


@given(acts=ACTS, most_bytes=st.sampled_from([400, 1000, 10**6]))
def test_whenever_it_is_looked_at_what_is_shown_in_the_end_is_the_surviving_line(
    acts: list[tuple[str, int]], most_bytes: int
) -> None:
    run = ExportedRun(run=fabricate(MemoryStore("any"), "bard"))
    shown = Shown(run, most_bytes)
    run.start()
    step, committed = 0, 0
    for act, count in acts:
        if act == "train":
            run.train(step + 1, step + count)
            step += count
        elif act == "commit" and step > committed:
            run.run.commit(step)
            committed = step
        elif act == "die":
            run.die()
            run.start()
            step = committed
        elif act == "look":
            shown.catch_up(run.state)
    assert shown.catch_up(run.state) == run.curve()
