import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.file_ceilings import ceiling_of, too_dear

FILE = "tests/cairn/cli/test_help.py"
SESSION = """
import pytest, sys
from tests import file_ceilings
class Registers:
    def pytest_configure(self, config):
        config.pluginmanager.register(file_ceilings.FileCeilings(config))
file_ceilings.USUAL_SECONDS = float(sys.argv[1])
sys.exit(pytest.main([sys.argv[2], "-q", "-c", "/dev/null", "-p", "no:cacheprovider"], plugins=[Registers()]))
"""
BUSY = """
import time
def test_is_busy():
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
"""


def test_a_file_above_its_ceiling_is_named_with_both_numbers() -> None:
    ceiling = ceiling_of(FILE)
    line = f"{FILE}: {ceiling + 1:.1f} processor seconds; its ceiling is {ceiling:.0f} (tests/file_ceilings.py)"
    assert too_dear(Counter({FILE: ceiling + 1})) == [line]


def test_a_file_at_its_ceiling_is_not_too_dear() -> None:
    assert too_dear(Counter({FILE: ceiling_of(FILE)})) == []


def test_a_session_with_a_file_above_its_ceiling_fails(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "test_busy.py"
    path.write_text(BUSY)
    done = subprocess.run(
        [sys.executable, "-c", SESSION, "0.05", str(path)], cwd=root, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, "TOO DEAR" in done.stdout) == (1, True), done.stdout + done.stderr
