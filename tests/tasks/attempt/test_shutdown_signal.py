import os
import signal
from collections.abc import Iterator

import pytest

from cairn.tasks.attempt.shutdown_signal import ShutdownSignal, raise_on_notice


@pytest.fixture
def own() -> Iterator[list[int]]:
    """The calls of a handler of SIGUSR1 that a script has set, and that signal's mask as the script left it."""
    calls = list[int]()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield calls
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGUSR1, before)


def raised(number: signal.Signals, extra: str = "") -> ShutdownSignal:
    notice = ShutdownSignal()
    with notice.listening(extra):
        signal.raise_signal(number)  # in this thread: no other one takes what this one blocks
    return notice


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, ""),
        (signal.SIGINT, ""),
        (signal.SIGHUP, "the terminal was closed (nohup or a deployment outlives it)"),
    ],
)
def test_a_notice_is_remembered_by_its_name_and_its_words(number: signal.Signals, words: str) -> None:
    notice = raised(number)
    assert (notice.signal, notice.detail) == (number.name, words)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_signal_of_a_scheduler_says_whose_it_is(name: str) -> None:
    said = f"the scheduler announced with {name} that this machine will be taken away"
    assert raised(signal.Signals[name], name).detail == said


def test_the_first_notice_names_the_end_and_later_ones_are_still_told() -> None:
    notice, heard = ShutdownSignal(), list[str | None]()
    with notice.on_shutdown(lambda: heard.append(notice.signal)):
        notice.request("aws", "AWS announced: stop at noon")
        notice.request("SIGTERM")
    assert heard == ["aws", "aws"]
    assert (notice.signal, notice.detail) == ("aws", "AWS announced: stop at noon")


def test_who_listens_late_is_told_at_once() -> None:
    notice, heard = ShutdownSignal(), list[str | None]()
    notice.request("SIGTERM")
    with notice.on_shutdown(lambda: heard.append(notice.signal)):
        assert heard == ["SIGTERM"]


def test_a_process_that_is_to_outlive_its_terminal_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        assert raised(signal.SIGHUP).signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handlers_of_before_are_back_afterwards() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with ShutdownSignal().listening("SIGUSR1"):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_scripts_own_handler_of_a_schedulers_signal_survives_training(own: list[int]) -> None:
    assert (raised(signal.SIGUSR1).signal, own) == (None, [signal.SIGUSR1])


def test_a_schedulers_signal_that_is_configured_goes_before_a_scripts_own_handler(own: list[int]) -> None:
    assert (raised(signal.SIGUSR1, "SIGUSR1").signal, own) == ("SIGUSR1", [])


def test_a_schedulers_signal_that_a_script_has_blocked_stays_blocked(own: list[int]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    raised(signal.SIGUSR1)
    assert signal.sigtimedwait({signal.SIGUSR1}, 0) is not None and not own


def test_the_handlers_of_a_commands_end_are_set_for_a_schedulers_signal_that_it_knows(own: list[int]) -> None:
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with raise_on_notice() as add:
            add("SIGUSR2")
            handled = [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)]
        ended = [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)]
    finally:
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert handled[0] == handled[1] and handled[0] not in ended
    os.kill(os.getpid(), signal.SIGUSR1)
    assert own == [signal.SIGUSR1]
