import os
import signal

import pytest

from cairn.tasks.attempt.shutdown_signal import ShutdownSignal


def raised(number: signal.Signals, extra: str = "") -> ShutdownSignal:
    notice = ShutdownSignal()
    with notice.listening(extra):
        os.kill(os.getpid(), number)
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


def test_a_signal_of_a_scheduler_says_whose_it_is() -> None:
    assert raised(signal.SIGUSR1, "SIGUSR1").detail.startswith("the scheduler announced with SIGUSR1")


def test_a_process_that_is_to_outlive_its_terminal_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        assert raised(signal.SIGHUP).signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handlers_of_before_are_back_afterwards() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with ShutdownSignal().listening():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before
