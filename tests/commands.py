"""The `cairn` command as tests run it: within this process, or in one of its own."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from cairn.cli.command import run_command
from tests.processes.waiting import patience_seconds

ROOT = Path(__file__).parents[1]
LIST_IMPORTS = "import sys, cairn.cli.command as c; c.run_command(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
"""A program that runs a command line and then writes the names of all modules that were imported to stderr."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


class Cairn(Protocol):
    """Runs one command line, with more environment if need be."""

    def __call__(self, *arguments: str, **environment: str) -> Ended:
        """Return how it ended."""
        ...


@pytest.fixture
def cairn(tmp_path: Path) -> Cairn:
    """The command within this process, in `tmp_path`; a store is chosen unless the arguments name one."""

    def run(*arguments: str, **environment: str) -> Ended:
        return run_here(arguments, tmp_path, environment)

    return run


@pytest.fixture
def cairn_process(tmp_path: Path) -> Cairn:
    """The command in a process of its own, in `tmp_path`; a store is chosen unless the arguments name one."""

    def run(*arguments: str, **environment: str) -> Ended:
        return run_process(arguments, tmp_path, environment)

    return run


def run_here(arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str]) -> Ended:
    """Run a command line in this process; folder, environment and signal handlers are put back afterwards."""
    out, err = _stream(), _stream()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        os.environ.update(chosen_folders(folder), **environment)
        try:
            code = run_command(list(arguments))
        finally:
            os.environ.clear()
            os.environ.update(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Ended(code=int(code), out=_text(out), err=_text(err))


def run_process(
    arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str], *, stdin: str = "", umask: int = -1
) -> Ended:
    """Run a command line in a process of its own."""
    return run_python(("-m", "cairn.cli.command", *arguments), folder, environment, stdin=stdin, umask=umask)


def run_python(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], *, stdin: str = "", umask: int = -1
) -> Ended:
    """Run Python with these words in a process of its own; its commands keep everything in the folder."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **chosen_folders(folder), "PYTHONPATH": str(ROOT), **environment},
        input=stdin,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=patience_seconds(),
        check=False,
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr)


def chosen_folders(folder: Path) -> dict[str, str]:
    """The variables with which a command keeps everything in `folder`."""
    return {"CAIRN_STORE": str(folder / "store"), "CAIRN_CACHE": str(folder / "cache")}


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n", write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    data = stream.buffer
    assert isinstance(data, io.BytesIO)
    return data.getvalue().decode()
