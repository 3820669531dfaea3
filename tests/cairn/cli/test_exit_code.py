import subprocess
import sys
from pathlib import Path

import pytest

from cairn.cli.command import code_of_error
from cairn.model.errors import InvalidInput
from cairn.reports.errors import InvalidQuery, ReportError, RunNotFound
from cairn.storage.errors import (
    AppendUnknown,
    Fenced,
    IntegrityError,
    ObjectMissing,
    StorageError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnsound,
)
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.errors import (
    BudgetExhausted,
    ConfigDrift,
    GateRefused,
    InvalidConfiguration,
    LiveOwner,
    TaskError,
    TrainerGone,
)
from cairn.tasks.policy.termination import EXIT_CODES, ExitCode
from tests.commands import Cairn

OUTCOMES = {
    "completed": 0,
    "error": 1,
    "budget-exhausted": 4,
    "storage": 75,
    "fenced": 7,
    "preempted": 75,
    "interrupted": 130,
    "cancelled": 130,
}
ERRORS: dict[type[BaseException], int] = {
    ZeroDivisionError: 1,
    ReportError: 1,
    TaskError: 1,
    TrainerGone: 1,
    StoreUnavailable: 1,
    StoreRefused: 2,
    ObjectMissing: 1,
    AppendUnknown: 1,
    StoreFull: 75,
    InvalidConfiguration: 2,
    InvalidQuery: 2,
    InvalidCorpus: 2,
    InvalidInput: 2,
    RunNotFound: 2,
    StoreUnsound: 2,
    StorageError: 2,
    GateRefused: 3,
    BudgetExhausted: 4,
    IntegrityError: 5,
    ConfigDrift: 6,
    LiveOwner: 7,
    Fenced: 7,
    KeyboardInterrupt: 130,
}


@pytest.mark.parametrize(("name", "code"), OUTCOMES.items())
def test_an_outcome_of_the_flow_has_the_code_the_contract_gives_it(name: str, code: int) -> None:
    assert EXIT_CODES[name] == code


@pytest.mark.parametrize(("error", "code"), ERRORS.items(), ids=lambda item: getattr(item, "__name__", str(item)))
def test_an_error_has_the_code_the_contract_gives_it(error: type[BaseException], code: int) -> None:
    assert code_of_error(error("why")) == code


def test_every_code_of_the_contract_is_in_the_table() -> None:
    assert sorted(ExitCode) == [0, 1, 2, 3, 4, 5, 6, 7, 75, 130]


LEAVES_SLOWLY = """
import os, threading
def linger():
    threading.main_thread().join()
    os.write(1, b"leaving")
    os.read(0, 1)
threading.Thread(target=linger).start()
"""
BREAKS = """
import os
class Fragile:
    def __del__(self, abort=os.abort):
        abort()
keep = Fragile()
"""
ASK = """
from cairn.cli.command import main
main(["status", "bard", "--store", "/nowhere/cairn-store"])
"""


def test_a_sigterm_while_the_command_leaves_does_not_change_the_code() -> None:
    words = [sys.executable, "-c", LEAVES_SLOWLY + ASK]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.read(7) == b"leaving"
        process.terminate()
        process.stdin.close()  # it lingers until now
    assert process.returncode == 2


def test_what_breaks_while_the_interpreter_is_taken_down_does_not_change_the_code() -> None:
    process = subprocess.run([sys.executable, "-c", BREAKS + ASK], capture_output=True, check=False)
    assert process.returncode == 2
    assert process.stderr.startswith(b"cairn: ")


@pytest.mark.parametrize(("error", "code"), [(StoreRefused, 2), (StoreUnavailable, 1)])
def test_a_store_that_refuses_or_is_away_has_one_code_in_every_command(
    cairn: Cairn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("no credentials")

    for name in ("read", "keys", "folders", "first", "size", "sizes"):
        monkeypatch.setattr(LocalStore, name, fail)
    (tmp_path / "run.toml").write_text('[data]\nsources = ["text.txt"]\n[training]\nsteps = 1\n')
    (tmp_path / "text.txt").write_text("a text")
    lines = (
        "runs",
        "status bard",
        "models",
        "explain bard",
        "train run.toml",
        "train run.toml --dry-run",
        "sweep bard",
    )
    assert {line: cairn(*line.split()).code for line in lines} == dict.fromkeys(lines, code)
