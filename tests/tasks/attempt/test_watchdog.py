import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.tasks.attempt.watchdog import HangDetector, HeartbeatGap, allowed_seconds, detecting_hangs
from cairn.tasks.configuration.settings import WatchdogConfig
from tests.tasks.slept_clock import Clock

CONFIG = WatchdogConfig(factor=10.0, floor_seconds=60.0, startup_seconds=900.0)
seconds = st.floats(min_value=0, max_value=1e6)
gaps = st.lists(seconds, min_size=4, max_size=200)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> HangDetector:
    return HangDetector(CONFIG, clock=clock.monotonic)


def speak(watch: HangDetector, clock: Clock, *lengths: float) -> None:
    """Give a first sign, then one after each of the gaps."""
    watch.record_heartbeat()
    for length in lengths:
        clock.sleep(length)
        watch.record_heartbeat()


@pytest.mark.parametrize("history", [(), (9.0,), (9.0, 9.0), (9.0, 9.0, 9.0)])
def test_without_a_history_the_start_up_time_holds(history: tuple[float, ...]) -> None:
    assert allowed_seconds(history, CONFIG) == 900.0


@pytest.mark.parametrize(
    ("history", "allowed"),
    [
        ((1.0, 2.0, 3.0, 4.0), 60.0),
        ((1.0, 2.0, 3.0, 20.0), 200.0),
        ((500.0, *[1.0] * 63), 5000.0),
        ((500.0, *[1.0] * 64), 60.0),
    ],
    ids=["never-below-the-floor", "ten-times-the-slowest", "remembers-64", "forgets-the-65th"],
)
def test_the_allowance_follows_the_slowest_recent_gap(history: tuple[float, ...], allowed: float) -> None:
    assert allowed_seconds(history, CONFIG) == allowed


@given(history=gaps, longer=seconds, data=st.data())
def test_a_slower_gap_never_shortens_the_allowance(history: list[float], longer: float, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(history) - 1))
    slower = [*history[:place], history[place] + longer, *history[place + 1 :]]
    assert allowed_seconds(slower, CONFIG) >= allowed_seconds(history, CONFIG)


@given(history=gaps)
def test_no_remembered_gap_would_have_been_called_a_hang(history: list[float]) -> None:
    assert allowed_seconds(history, CONFIG) >= max(*history[-64:], CONFIG.floor_seconds)


def test_a_child_is_overdue_only_beyond_what_its_steps_allow(watch: HangDetector, clock: Clock) -> None:
    speak(watch, clock, 7.0, 7.0, 8.0, 7.0)
    clock.sleep(80.0)
    assert not watch.heartbeat_gap().is_overdue
    clock.sleep(0.5)
    assert watch.heartbeat_gap().is_overdue
    assert watch.heartbeat_gap() == HeartbeatGap(seconds=80.5, allowed_seconds=80.0)


def test_waiting_for_the_first_sign_is_no_gap(watch: HangDetector, clock: Clock) -> None:
    clock.sleep(800.0)
    speak(watch, clock, 1.0, 1.0, 1.0, 1.0)
    assert watch.heartbeat_gap().allowed_seconds == 60.0


def test_a_child_that_never_speaks_is_overdue_after_the_start_up_time(watch: HangDetector, clock: Clock) -> None:
    clock.sleep(901.0)
    assert watch.heartbeat_gap().is_overdue


def test_every_sign_ends_the_silence(watch: HangDetector, clock: Clock) -> None:
    speak(watch, clock, 7.0, 7.0, 7.0, 7.0)
    clock.sleep(71.0)
    watch.record_heartbeat()
    assert watch.heartbeat_gap().seconds == 0.0


def test_a_child_that_waits_for_a_command_is_never_overdue(watch: HangDetector, clock: Clock) -> None:
    speak(watch, clock, 1.0, 1.0, 1.0, 1.0)
    watch.pause()
    clock.sleep(1e5)
    assert not watch.heartbeat_gap().is_overdue
    watch.resume()
    assert watch.heartbeat_gap() == HeartbeatGap(seconds=0.0, allowed_seconds=60.0)
    clock.sleep(61.0)
    assert watch.heartbeat_gap().is_overdue


def test_signs_during_a_rest_and_the_rest_itself_are_no_gaps(watch: HangDetector, clock: Clock) -> None:
    speak(watch, clock, 1.0, 1.0, 1.0, 1.0)
    watch.pause()
    clock.sleep(5000.0)
    watch.record_heartbeat()
    clock.sleep(5000.0)
    watch.resume()
    clock.sleep(2.0)
    watch.record_heartbeat()
    assert watch.heartbeat_gap().allowed_seconds == 60.0


def test_a_watch_that_slept_gives_the_child_a_fresh_allowance(watch: HangDetector, clock: Clock) -> None:
    speak(watch, clock, 1.0, 1.0, 1.0, 1.0)
    watch.record_poll(1.0)
    clock.sleep(8 * 3600.0)
    watch.record_poll(1.0)
    assert not watch.heartbeat_gap().is_overdue
    assert watch.heartbeat_gap().seconds == 0.0


@pytest.mark.parametrize(("late", "counted"), [(0.3, 0.0), (0.2, 13.0)])
def test_a_poll_that_is_late_by_a_quarter_of_the_allowance_restarts_it(
    watch: HangDetector, clock: Clock, late: float, counted: float
) -> None:
    speak(watch, clock, 1.0, 1.0, 1.0, 1.0)
    watch.record_poll(1.0)
    clock.sleep(1.0 + late * 60.0)
    watch.record_poll(1.0)
    assert watch.heartbeat_gap().seconds == pytest.approx(counted)


def test_a_watch_that_was_awake_lets_the_silence_count(watch: HangDetector, clock: Clock) -> None:
    speak(watch, clock, 1.0, 1.0, 1.0, 1.0)
    for _ in range(61):
        watch.record_poll(1.0)
        clock.sleep(1.0)
    assert watch.heartbeat_gap().is_overdue


def test_a_sign_heard_before_the_late_tick_does_not_enter_the_history(watch: HangDetector, clock: Clock) -> None:
    speak(watch, clock, 1.0, 1.0, 1.0, 1.0)
    watch.record_poll(1.0)
    clock.sleep(8 * 3600.0)
    watch.record_heartbeat()
    watch.record_poll(1.0)
    assert watch.heartbeat_gap().allowed_seconds == 60.0


def collector(heard: list[HeartbeatGap], done: threading.Event) -> Callable[[HeartbeatGap], None]:
    def hear(silence: HeartbeatGap) -> None:
        heard.append(silence)
        done.set()

    return hear


def test_the_thread_reports_a_silence_once() -> None:
    clock, heard, done = Clock(), list[HeartbeatGap](), threading.Event()
    watch = HangDetector(CONFIG, clock=clock.monotonic)
    clock.sleep(901.0)
    with detecting_hangs(watch, collector(heard, done), poll_seconds=0.001):
        assert done.wait(240)
    assert heard == [HeartbeatGap(seconds=901.0, allowed_seconds=900.0)]


def test_the_thread_ends_with_its_block_and_says_nothing_of_a_child_that_speaks() -> None:
    heard, done = list[HeartbeatGap](), threading.Event()
    with detecting_hangs(HangDetector(CONFIG), collector(heard, done), poll_seconds=0.001):
        assert "watchdog" in {thread.name for thread in threading.enumerate()}
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}
    assert heard == []
