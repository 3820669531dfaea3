"""Runs `tests.cuda.trace` and its kin in a process of its own, so that its stand-ins reach no other test."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Trace = dict[str, Any]
"""A case, or what was found in one: JSON."""


def traced(*cases: Trace, module: str = "tests.cuda.trace", **variables: str) -> list[Trace]:
    """Return what a module in a process of its own finds in each of these cases."""
    words = [sys.executable, "-m", "tests.cuda.fake_cuda", module, *map(json.dumps, cases)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Trace] = json.loads(done.stdout)
    return found
