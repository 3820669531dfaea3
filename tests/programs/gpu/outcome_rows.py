"""A plugin of pytest (named by `-p`): each test's outcome as a row, with what the test recorded."""

import pytest

from tests.programs.gpu.rows import say


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say how a test ended, when it has; what was skipped says why."""
    if report.when != "call" and report.outcome == "passed":
        return
    why = ""
    if report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if report.failed:
        why = next((line[2:] for line in report.longreprtext.splitlines()[::-1] if line.startswith("E ")), "failed")
    recorded = {name: value for name, value in report.user_properties if name != "why"}
    passed = None if report.skipped else report.passed
    say(
        report.nodeid.removeprefix("tests/"),
        passed=passed,
        seconds=round(report.duration, 2),
        **recorded,
        why=why.strip()[:200],
    )
