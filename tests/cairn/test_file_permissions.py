"""What a command writes is never writable for everybody, whatever the umask allows."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabricated_run import FabricatedRun

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077], ids=oct)
def test_a_command_gives_everybody_no_right_to_write(bard: FabricatedRun, tmp_path: Path, umask: int) -> None:
    before = set(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "cairn.cli.command", "report", "bard", "--html", "page.html", "--store", "store"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CAIRN_CACHE": str(tmp_path / "cache")},
        umask=umask,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = {path: stat.S_IMODE(path.stat().st_mode) for path in set(tmp_path.rglob("*")) - before}
    assert tmp_path / "page.html" in written
    assert {path: oct(mode) for path, mode in written.items() if mode & (umask | stat.S_IWOTH)} == {}
