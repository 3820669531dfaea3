"""Every command once in a process of its own: its exit code, and what it imports. The other tests run it in theirs."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from cairn.cli.app import app
from cairn.storage.stores.local_store import LocalStore
from tests.commands import run_python
from tests.fabricated_run import fabricate, store_bard
from tests.settled_run import hold, store_done

pytestmark = pytest.mark.xdist_group("real-commands")  # they run once for all tests

RUNS_ALL = """
import importlib, json, os, pathlib, shlex, shutil, sys, cairn.cli.command as c
here = pathlib.Path.cwd()
for name in sys.argv[1:]:
    importlib.import_module(name)
for number, line in json.load(sys.stdin).items():
    child = os.fork()
    if child == 0:
        os.chdir(shutil.copytree(here / "template", here / number))
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        try:
            c.main(shlex.split(line))
        finally:
            pathlib.Path("loaded.txt").write_text(" ".join(sys.modules))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (here / number / "code.txt").write_text(str(code))
"""
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
        "note bard": LIGHT,
        "note bard good --tag best": LIGHT,
        "models": LIGHT,
        "explain bard": LIGHT - SETTINGS,
        "report bard": LIGHT - SETTINGS - PAGES,
    }.items()
]
OTHERS = [
    Real(line="config"),
    Real(line="init text.txt", unwanted=HEAVY),
    Real(line="simulate --days 1 --seeds 1 --devices 64"),
    Real(line="sweep bard"),
    Real(line="diagnose bard"),
    Real(line="verify bard", code=5, unwanted=HEAVY),
    Real(line="replay nobody", code=2, unwanted=HEAVY),
    Real(line="watch --once"),
    Real(line="rollback"),
    Real(line="completion bash"),
    Real(line="__complete sample bard@"),
    Real(line="__complete train --set t"),
    Real(line="sql nonsense", code=2),
    Real(line="data nobody", code=2, unwanted=HEAVY),
    Real(line="plot bard curve.png", unwanted=HEAVY | STORES | {"matplotlib.pyplot"}),
    Real(line="compare bard done", unwanted=HEAVY),
    Real(line="sample nobody", code=2),
    Real(line="evaluate nobody", code=2),
    Real(line="promote nobody", code=2),
    Real(line="export nobody out", code=2, unwanted=HEAVY),
    Real(line="delete bard --dry-run", code=3),
    Real(line="fork nobody another", code=2, unwanted=HEAVY),
    Real(line="import-tokens --train gone.bin --val gone.bin --vocab-size 300", code=2, unwanted=HEAVY),
    Real(line="export-tokens nobody out", code=2, unwanted=HEAVY),
    Real(line="train run.toml --set training.steps=4 --dry-run", unwanted=HEAVY),
    Real(line="train run.toml --set training.steps=4 --set model.n_embd=9", code=2, unwanted=HEAVY),
    Real(line="train --run-id bard --set training.steps=50", code=6, unwanted=HEAVY),
    Real(line="train --run-id done", unwanted=HEAVY),
    Real(line="train --run-id held --set lease.heartbeat_seconds=300 --set lease.seconds=900", code=7, unwanted=HEAVY),
    Real(line="ui --port 70000", code=2),
    Real(line="doctor --loudly", code=2),
    Real(line="train run.toml --steps 100", code=2, unwanted=LIGHT),
]


COMMANDS = [*READING, *OTHERS]


def shared_imports(command: Real) -> tuple[str, ...]:
    """Modules that most commands import which may import as much as this one: they are imported once for all."""
    if command.unwanted >= SETTINGS:
        return ()
    if command.unwanted >= STORES:
        return ("cairn.tasks.configuration.run_configuration",)
    return ("cairn.operations.prefect_session", "cairn.flows.preparation.training_request")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each command ran: with a store for itself, in a process forked after the imports that others share."""
    folder = tmp_path_factory.mktemp("commands")
    template = folder / "template"
    template.mkdir()
    (template / "run.toml").write_text(CONFIG)
    (template / "text.txt").write_text("".join(f"line {number} of a text\n\n" for number in range(200)))
    store = LocalStore(template / "store")
    store_bard(store).end("error", action="stop")
    store_done(store)
    hold(fabricate(store, "held"))
    nobody = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}  # what asks the orchestrator fails
    own = {"CAIRN_STORE": "store", "CAIRN_CACHE": "cache", **nobody}
    for imported in {shared_imports(command) for command in COMMANDS}:
        lines = {number: command.line for number, command in enumerate(COMMANDS) if shared_imports(command) == imported}
        done = run_python(("-c", RUNS_ALL, *imported), folder, own, stdin=json.dumps(lines))
        assert done.code == 0, done.err
    return {command.line: folder / str(number) for number, command in enumerate(COMMANDS)}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line)
def test_a_command_leaves_with_its_code_and_imports_no_more_than_it_needs(
    folders: dict[str, Path], command: Real
) -> None:
    folder = folders[command.line]
    loaded = (folder / "loaded.txt").read_text().split()
    assert int((folder / "code.txt").read_text()) == command.code, (folder / "output.txt").read_text()
    assert command.unwanted & set(loaded) == set()
    assert command.most_modules is None or len(loaded) < command.most_modules


def test_no_command_is_missing() -> None:
    tried = {command.line.split()[0] for command in COMMANDS}
    assert tried - {"__complete"} == {name for name in app if not name.startswith("-")}
