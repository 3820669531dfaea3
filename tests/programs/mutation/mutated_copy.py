"""A copy of the checkout, in which one mutant after the other is tried on tests."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path

from tests.house.packages import TOP_LEVEL

ROOT = Path(__file__).parents[3]
COPIED = (*TOP_LEVEL, "tests", "docs", "constraints")


class MutatedCopy:
    """The copy, in a folder that is empty before."""

    def __init__(self, folder: Path) -> None:
        """Copy what tests need."""
        self._folder = folder
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in TOP_LEVEL[1:]:  # an installed checkout finds its own packages by itself, a copy of one by these
            (folder / "cairn" / name).symlink_to(folder / name)
        for path in ROOT.glob("*"):
            if path.is_file():
                shutil.copy2(path, folder / path.name)

    def run_tests(
        self, path: str, mutated: bytes, tests: Sequence[str], *, seconds: float | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run the tests, to the first that fails, while the file at `path` is `mutated`; may raise TimeoutExpired."""
        file = self._folder / path
        honest = file.read_bytes()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        # A session of its own: what it shares with its processes must not reach the honest ones.
        own = {name: value for name, value in os.environ.items() if not name.startswith(("CAIRN_TEST_", "PYTEST_"))}
        environment = {**own, "PYTHONPATH": str(self._folder)}
        file.write_bytes(mutated)
        _forget_bytecode(file)
        try:
            return subprocess.run(
                command, cwd=self._folder, env=environment, timeout=seconds, capture_output=True, text=True, check=False
            )
        finally:
            file.write_bytes(honest)
            _forget_bytecode(file)


def _forget_bytecode(path: Path) -> None:
    """Delete the compiled form: it is told from a newer text only by size and second."""
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
