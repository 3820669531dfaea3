"""The surviving line of a run: what a curve shows after kills and roll-backs."""

from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_state import AttemptRecord
from cairn.storage.logs.step_log import StepRecord, splice
from tests import entries


def attempt(number: int, resumed: int) -> AttemptRecord:
    reference = CheckpointReference(step=resumed, attempt=number - 1, prefix=f"p{resumed}", manifest_sha256="m")
    started = entries.started(number, resumed_from=reference if resumed else None)
    return AttemptRecord(started=started, started_at=entries.NOON)


def lines(number: int, first: int, last: int) -> list[StepRecord]:
    return [entries.step_record(step, number) for step in range(first, last + 1)]


def test_steps_lost_to_a_kill_are_shown_once_from_the_attempt_that_repeated_them() -> None:
    points = splice([*lines(1, 1, 27), *lines(2, 21, 40)], [attempt(1, 0), attempt(2, 20)])
    assert [point.record.step for point in points] == list(range(1, 41))
    assert [point.record.attempt for point in points] == [1] * 20 + [2] * 20
    assert [point.replays for point in points] == [0] * 20 + [1] * 7 + [0] * 13


def test_a_roll_back_behind_an_earlier_resume_drops_everything_after_it() -> None:
    points = splice(
        [*lines(1, 1, 40), *lines(2, 41, 45), *lines(3, 21, 30)], [attempt(1, 0), attempt(2, 40), attempt(3, 20)]
    )
    assert [(point.record.step, point.record.attempt) for point in points] == [
        *((step, 1) for step in range(1, 21)),
        *((step, 3) for step in range(21, 31)),
    ]


def test_an_attempt_that_trained_nothing_leaves_the_line_whole() -> None:
    points = splice(lines(1, 1, 20), [attempt(1, 0), attempt(2, 20)])
    assert [point.record.step for point in points] == list(range(1, 21))


def test_records_of_an_attempt_the_log_does_not_know_are_left_out() -> None:
    assert splice([*lines(1, 1, 5), *lines(9, 6, 9)], [attempt(1, 0)])[-1].record.step == 5


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8))
def test_the_line_never_doubles_drops_or_shifts_a_step(history: list[tuple[int, int]]) -> None:
    records, attempts, reached = [], [], 0
    for number, (back, ahead) in enumerate(history, start=1):
        resumed = max(0, reached - back)
        attempts.append(attempt(number, resumed))
        records += lines(number, resumed + 1, resumed + ahead)
        reached = resumed + ahead
    assert [point.record.step for point in splice(records, attempts)] == list(range(1, reached + 1))
