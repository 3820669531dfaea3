"""What every test stands on: no network, no settings from outside, one thread per worker.

Owns the seams all suites share; refuses to know any package: each suite's own fixtures live beside it.
"""

import functools
import gc
import itertools
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

from tests.environment_allow_list import restrict_this_process
from tests.file_ceilings import FileCeilings, ceilings_asked_for
from tests.full_amount import share_of
from tests.log_judge import judge_files
from tests.session_folder import close_session, open_session
from tests.time_allowance import skip_when_time_is_over

LINUX_SUITES = frozenset({"chaos", "crash", "processes"})
HERE = Path(__file__).parent
NEEDS_NO_SERVER = HERE / "protocol" / "test_enumeration.py"
LONG = frozenset(
    {
        HERE / "cairn" / "cli" / "test_real_commands.py",
        HERE / "protocol" / "test_simulator.py",
        HERE / "storage" / "checkpoints" / "test_sweep.py",
        HERE / "wiring" / "test_configuration_keys.py",
        HERE / "wiring" / "test_flow.py",
    }
)
"""Files of which a worker would be at one for long when the other has nothing left."""
FILES_BESIDE_A_COMMAND = 1
LONGEST_ID = 60
LOCAL_HOSTS = frozenset({"127.0.0.1", "::ffff:127.0.0.1", "::1", "localhost", "0.0.0.0", ""})

_OWNS_SESSION = pytest.StashKey[bool]()
_FOLDERS = itertools.count()
_PREFECTS_SETTINGS = list[object]()
"""Those of this process, once Prefect has been imported."""

sys.dont_write_bytecode = False  # whatever the caller's variables say: the tests of another session begin sooner
restrict_this_process()  # now, since the conftest of a folder may import torch
settings.register_profile("cairn", deadline=None, derandomize=True, database=None, max_examples=50)


def pytest_configure(config: pytest.Config) -> None:
    """Fix the environment before any package is imported; child processes inherit it."""
    settings.load_profile("cairn")
    config.stash[_OWNS_SESSION] = open_session()
    _hear_signals()
    os.environ.update(
        CAIRN_CACHE=tempfile.mkdtemp(prefix="cairn-work-"), PREFECT_HOME=tempfile.mkdtemp(prefix="cairn-prefect-")
    )
    if ceilings_asked_for():
        config.pluginmanager.register(FileCeilings(config))


def _hear_signals() -> None:
    """Take back what nohup or a shell's background ignores: children inherit it, and tests send them these signals."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove this worker's Prefect home and work folder, and what the session shared."""
    import shutil

    if config.stash[_OWNS_SESSION]:
        close_session()
    for name in ("PREFECT_HOME", "CAIRN_CACHE"):
        shutil.rmtree(os.environ[name], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is imported and collected, which lives as long as the session, and later rarely.

    A part of the suite took 140 processor seconds, and 129 with these thresholds (two turns each).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the suites that fork real commands or read /proc as needing Linux; skip on other systems what needs it.

    Real commands come first, each test on its own, with files that only compute between them, the long ones first, so
    that no core waits and the workers end together. While the session's server starts, for which one worker waits,
    another runs a file that needs none. Of the other suites, whose tests are short, one worker runs a whole file: to
    hand out each test takes longer.
    """
    items[:] = _spread(sorted(items, key=_place))
    for item in items:
        if _suite(item) in LINUX_SUITES:
            item.add_marker(pytest.mark.linux)
        elif item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{_suite(item)}-{item.path.stem}"))
        if sys.platform != "linux" and item.get_closest_marker("linux"):
            item.add_marker(pytest.mark.skip(reason="needs Linux"))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case by the beginning of a long value: the workers tell each other every name, one had 12 MB."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_ID:
        return f"{val[:LONGEST_ID]!r}, {len(val):,} in all".replace("\\", "")
    return None


def _place(item: pytest.Item) -> int:
    if _suite(item) in LINUX_SUITES:
        return 0 if _suite(item) == "chaos" else 2
    return 1 if item.path == NEEDS_NO_SERVER else 3 if item.path in LONG else 4


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put files that only compute between real commands, which wait for much of their time: all cores stay busy."""
    computing = [list(file) for _, file in itertools.groupby(filter(_computes, items), key=lambda item: item.path)]
    spread, begun = list[pytest.Item](), set[str]()
    for item in itertools.filterfalse(_computes, items):
        group = item.get_closest_marker("xdist_group")
        name = str(group.args[0]) if group else item.nodeid
        beside = 0 if name in begun else FILES_BESIDE_A_COMMAND
        spread += [*itertools.chain(*computing[:beside]), item]
        computing = computing[beside:]
        begun.add(name)
    return [*spread, *itertools.chain(*computing)]


def _computes(item: pytest.Item) -> bool:
    return _place(item) > 2


def _suite(item: pytest.Item) -> str:
    return _suite_of(item.path)


@functools.cache
def _suite_of(path: Path) -> str:
    return path.relative_to(HERE).parts[0]


def pytest_runtest_setup() -> None:
    """Begin no test when the time for it is over."""
    skip_when_time_is_over()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder, whose logs are judged after the test unless it is marked to leave one that is not sound.

    Of the default amount of tests a third is judged, by their names; of the full amount all. Pytest's own fixture looks
    through all folders that were made before, which is 1.6 ms of a core for each.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}-{next(_FOLDERS)}"
    folder.mkdir(mode=0o700)
    yield folder
    is_judged = crc32(request.node.nodeid.encode()) % share_of(3) == 0
    if is_judged and request.node.get_closest_marker("unsound_log") is None:
        judge_files(folder)


@pytest.fixture(autouse=True)
def prefects_own_settings() -> Iterator[None]:
    """Leave Prefect's settings as a test found them: a command in this process takes its environment's for good."""
    yield
    if context := sys.modules.get("prefect.context"):
        if not _PREFECTS_SETTINGS:
            context.refresh_global_settings_context()  # imported during this test: from the environment after it
            _PREFECTS_SETTINGS.append(context.GLOBAL_SETTINGS_CONTEXT)
        context.__dict__["GLOBAL_SETTINGS_CONTEXT"] = _PREFECTS_SETTINGS[0]


@pytest.fixture(autouse=True, scope="session")
def no_fsync() -> Iterator[None]:
    """Skip fsync in the tests' own processes: no test cuts the power, and the page cache outlives a process.

    A quarter of a second for each run that a test makes. A test that is about fsync puts its own in place.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many claims passed, and how much of the protocol was tried, summed over all workers."""
    cases = [report.nodeid for report in terminalreporter.getreports("passed")]
    claims = {node.partition("[")[0].partition("@")[0] for node in cases}  # xdist adds the group after @
    terminalreporter.write_line(f"passed: {len(claims):,} claims (test functions) in {len(cases):,} cases")
    counts = dict.fromkeys(("cases", "arrivals", "arrivals_played", "schedules", "mutants"), 0)
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if (name := name.removeprefix("protocol_")) in counts:
                counts[name] += int(str(value))
    if any(counts.values()):
        tried, arrivals, played, schedules, mutants = counts.values()
        terminalreporter.write_line(
            f"protocol: {tried:,} operation × fault cases, {arrivals:,} arrivals of late requests ({played:,} "
            f"played to the end, the others each like one of them), {schedules:,} schedules, {mutants} mutants caught"
        )


@pytest.fixture(autouse=True, scope="session")
def offline() -> Iterator[None]:
    """Refuse every connection that would leave this machine, naming where it wanted to go."""
    connect: Callable[[socket.socket, Any], None] = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOCAL_HOSTS:
            raise AssertionError(f"a test wanted to connect to {address}; tests run offline")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_locally)
        yield
