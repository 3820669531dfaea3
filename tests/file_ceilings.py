"""Fails a session in which the tests of one file used more processor time than that file may; on in CI only.

Processor seconds of the test's process and of the children it waited for: another load on the machine adds nothing.
"""

import functools
import os
import time
from collections import Counter
from collections.abc import Generator

import pytest

VARIABLE = "CAIRN_TEST_CEILINGS"
USUAL_SECONDS = 25.0
CEILINGS: dict[str, float] = {
    "tests/crash/test_approval.py": 30.0,
    "tests/protocol/test_enumeration.py": 45.0,
    "tests/wiring/test_configuration_keys.py": 40.0,  # a case a key
    "tests/wiring/test_mutants.py": 1200.0,
}
"""Files that may use more than usual."""
_WORK, _USUAL_WORK_SECONDS = 2_000_000, 0.12
_PROPERTY = "cpu_seconds"
_DEAREST = 10


def ceilings_asked_for() -> bool:
    """Whether this session is to hold every file to its ceiling."""
    return os.environ.get(VARIABLE) == "1"


def used_seconds() -> float:
    """Processor seconds of this process so far, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def too_dear(used: Counter[str]) -> list[str]:
    """Return a line for each file that used more than its ceiling."""
    return [
        f"{file}: {seconds:.1f} processor seconds; its ceiling is {ceiling_of(file):.0f} (tests/file_ceilings.py)"
        for file, seconds in sorted(used.items())
        if seconds > ceiling_of(file)
    ]


def ceiling_of(file: str) -> float:
    """Return how many processor seconds a file may use."""
    return CEILINGS.get(file, USUAL_SECONDS) * slowness()


@functools.cache
def slowness() -> float:
    """How many times longer than usual this machine takes for a fixed piece of work; at least 1."""
    began = time.process_time()
    sum(number * number for number in range(_WORK))
    return max(1.0, (time.process_time() - began) / _USUAL_WORK_SECONDS)


class FileCeilings:
    """A plugin: measures each phase of each test where it runs, and sums by file where all reports arrive."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._used = Counter[str]()
        self._before = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Begin to measure."""
        self._before = used_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note what the phase used in its report, which travels to the process that began the session."""
        report = yield
        now = used_seconds()
        report.user_properties.append((_PROPERTY, now - self._before))
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase to its file."""
        seconds = sum(float(str(value)) for name, value in report.user_properties if name == _PROPERTY)
        self._used[report.nodeid.partition("::")[0]] += seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn a session that passed into one that failed if a file was too dear."""
        if not self._is_worker and session.exitstatus == pytest.ExitCode.OK and too_dear(self._used):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which files were the dearest, and which were too dear."""
        total = sum(self._used.values())
        terminalreporter.write_line(f"processor seconds: {total:,.0f} in {len(self._used)} files; the dearest:")
        for file, seconds in self._used.most_common(_DEAREST):
            terminalreporter.write_line(f"  {seconds:6.1f}  {file}")
        for line in too_dear(self._used):
            terminalreporter.write_line(f"TOO DEAR {line}", red=True)
