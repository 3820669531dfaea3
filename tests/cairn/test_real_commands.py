"""Every command once in a process of its own: its exit code, and what it imports. The other tests run it in theirs."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cairn.cli.app import EXAMPLES
from tests.commands import ROOT, chosen_folders
from tests.fabricated_run import FabricatedRun

LISTS_LOADED = (
    "import atexit, sys, cairn.cli.command as c;"
    "atexit.register(lambda: print('loaded', *sys.modules, file=sys.stderr)); c.main()"
)
HEAVY = frozenset({"torch", "prefect"})
STORES = frozenset({"fsspec", "pyarrow"})
SETTINGS, PAGES = frozenset({"pydantic"}), frozenset({"jinja2"})
LIGHT = HEAVY | STORES | SETTINGS | PAGES
MOST_MODULES = 600  # of some 250 to 400, so that every command answers well under a second
CONFIG = '[data]\nsources = ["text.txt"]\n[model]\nblock_size = 8\nn_layer = 1\nn_embd = 8\nn_head = 2\n'


@dataclass(frozen=True, kw_only=True, slots=True)
class Real:
    """A command line, the exit code it gets on `bard`, and what it must not import."""

    line: str
    code: int = 0
    unwanted: frozenset[str] = HEAVY | STORES
    most_modules: int | None = None


READING = [
    Real(line=line, unwanted=unwanted, most_modules=MOST_MODULES)
    for line, unwanted in {
        "runs": LIGHT,
        "status bard": LIGHT,
        "attempts bard": LIGHT,
        "checkpoints bard": LIGHT,
        "evaluations bard": LIGHT,
        "log bard": LIGHT,
        "models": LIGHT,
        "explain bard": LIGHT - SETTINGS,
        "report bard": LIGHT - SETTINGS - PAGES,
    }.items()
]
OTHERS = [
    Real(line="config"),
    Real(line="simulate"),
    Real(line="sweep bard"),
    Real(line="diagnose bard"),
    Real(line="verify bard", code=5, unwanted=HEAVY),
    Real(line="watch --once"),
    Real(line="rollback"),
    Real(line="completion bash"),
    Real(line="sql nonsense", code=2),
    Real(line="data nobody", code=2, unwanted=HEAVY),
    Real(line="plot nobody curve.png", code=2),
    Real(line="sample nobody", code=2),
    Real(line="evaluate nobody", code=2),
    Real(line="promote nobody", code=2),
    Real(line="export nobody out", code=2, unwanted=HEAVY),
    Real(line="import-tokens --train gone.bin --val gone.bin --vocab-size 300", code=2, unwanted=HEAVY),
    Real(line="export-tokens nobody out", code=2, unwanted=HEAVY),
    Real(line="train run.toml --set training.steps=4 --dry-run", unwanted=HEAVY),
    Real(line="train run.toml --set training.steps=4 --set model.n_embd=9", code=2, unwanted=HEAVY),
    Real(line="train --run-id bard --set training.steps=50", code=6, unwanted=HEAVY),
    Real(line="doctor --loudly", code=2),
]


@pytest.mark.parametrize("command", [*READING, *OTHERS], ids=lambda command: command.line)
def test_a_command_leaves_with_its_code_and_imports_no_more_than_it_needs(
    bard: FabricatedRun, tmp_path: Path, command: Real
) -> None:
    bard.end("error", action="stop")
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n\n" for number in range(200)))
    done = subprocess.run(
        [sys.executable, "-c", LISTS_LOADED, *command.line.split()],
        cwd=tmp_path,
        env={
            **os.environ,
            **chosen_folders(tmp_path),
            "PYTHONPATH": str(ROOT),
            "PREFECT_API_URL": "http://127.0.0.1:9/api",  # nobody listens: what asks the orchestrator fails
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said, _, loaded = done.stderr.rpartition("loaded ")
    assert done.returncode == command.code, said
    assert command.unwanted & set(loaded.split()) == set()
    assert command.most_modules is None or len(loaded.split()) < command.most_modules


def test_no_command_is_missing() -> None:
    assert {command.line.split()[0] for command in [*READING, *OTHERS]} == set(EXAMPLES)
