"""What a command writes is never writable for everybody, whatever the umask allows."""

import stat
from pathlib import Path

import pytest

from tests.commands import run_process
from tests.fabricated_run import FabricatedRun


@pytest.mark.parametrize(
    "umask",
    [0o000, pytest.param(0o022, marks=pytest.mark.slow)],  # quick witness: the umask that takes nothing away
    ids=oct,
)
def test_a_command_gives_everybody_no_right_to_write(bard: FabricatedRun, tmp_path: Path, umask: int) -> None:
    before = set(tmp_path.rglob("*"))
    done = run_process(("report", "bard", "--html", "page.html"), tmp_path, {}, umask=umask)
    assert done.code == 0, done.err
    written = {path: stat.S_IMODE(path.stat().st_mode) for path in set(tmp_path.rglob("*")) - before}
    assert tmp_path / "page.html" in written
    assert {path: oct(mode) for path, mode in written.items() if mode & (umask | stat.S_IWOTH)} == {}
