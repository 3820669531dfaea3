"""Processes that a benchmark starts for one contender each, so that none inherits what another has left."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def answer_of(module: str, *words: str, **variables: str) -> Any:
    """Run a module of this checkout to its end and return its last line, which is JSON; raises RuntimeError."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(words)}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def environment_in(folder: Path, source: Path = ROOT) -> dict[str, str]:
    """Return the environment of a command of the checkout `source`: its folders are here, nothing names a server."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "CAIRN_"))}
    own = {"PREFECT_HOME": str(folder / "prefect"), "CAIRN_CACHE": str(folder / "cache"), "PYTHONPATH": str(source)}
    return inherited | own


def set_options(settings: Iterable[str]) -> list[str]:
    """Return the words that make a command train with these settings."""
    return [word for setting in settings for word in ("--set", setting)]


def resident_bytes(field: str) -> int:
    """Return a field of this process's memory: VmRSS now, VmHWM at most."""
    # Not getrusage: its maximum begins with that of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
