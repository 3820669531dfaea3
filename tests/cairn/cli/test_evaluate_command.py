"""`cairn evaluate` on a real, small checkpoint: measured once, beside others, under files of one's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from tests.commands import run_here
from tests.processes.fork_server import fork_server
from tests.writing_run import open_writing_run

pytestmark = pytest.mark.xdist_group("evaluate-verb")  # its run is made once for all its tests

SUITE = "batches = 1\nbatch_size = 2\nsample_tokens = 4\n[[evaluators]]\n"
Evaluate = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run of two commits, and suite files."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "count.py").write_text("import os, sys; print('{\"files\": %d}' % len(os.listdir(sys.argv[1])))")
    (folder / "count.toml").write_text(f'{SUITE}name = "count"\ncommand = "python count.py"\n')
    broken = """command = ["python", "-c", "raise SystemExit('nothing works')"]"""
    (folder / "broken.toml").write_text(f'{SUITE}name = "broken"\n{broken}\n')
    own = ("evaluation.batches=1", "evaluation.batch_size=2", "evaluation.sample_tokens=4", "training.threads=1")
    run = open_writing_run(LocalStore(folder / "store"), folder, overrides=own)
    run.start()
    for step in (10, 20):
        run.commit(step, seed=step)
    return folder


@pytest.fixture(scope="module")
def evaluate(folder: Path) -> Evaluate:
    """The command, from the folder: exit code, and stdout or else stderr; evaluators are forked with torch imported."""

    def run(*arguments: str) -> tuple[int, str]:
        with fork_server().forking():
            ended = run_here(("evaluate", *arguments), folder, {})
        return ended.code, ended.out or ended.err

    return run


@pytest.fixture(scope="module")
def measured(evaluate: Evaluate) -> dict[str, Any]:
    """Step 10 under the run's own suite, then step 20 under a file that adds an evaluator."""
    assert evaluate("bard@10")[0] == 0
    code, printed = evaluate("bard@20", "--suite", "count.toml", "--json")
    assert code == 0, printed
    found: dict[str, Any] = json.loads(printed)
    return found


def evaluated_under(folder: Path) -> list[tuple[int, str]]:
    state = RunLog(LocalStore(folder / "store"), "bard").refresh()
    return [(item.step, item.suite) for item in state.evaluations]


def test_every_suite_of_the_file_is_measured(measured: dict[str, Any]) -> None:
    mine = {row["evaluation"]["suite"]: row["evaluation"] for row in measured["rows"] if row["role"] == "this"}
    assert (measured["run_id"], measured["step"], measured["status"]) == ("bard", 20, "recorded")
    assert set(mine) == {"held-out", "count"} and mine["count"]["metrics"] == {"files": 6.0}
    assert {"val_loss", "perplexity", "bits_per_byte"} <= set(mine["held-out"]["metrics"])


def test_earlier_evaluations_under_the_same_suite_stand_beside_it(measured: dict[str, Any]) -> None:
    rows = [(row["role"], row["evaluation"]["step"], row["evaluation"]["suite"]) for row in measured["rows"]]
    assert rows == [("this", 20, "held-out"), ("earlier", 10, "held-out"), ("this", 20, "count")]


@pytest.mark.usefixtures("measured")
def test_what_is_on_record_is_not_measured_again_unless_asked(evaluate: Evaluate, folder: Path) -> None:
    before = evaluated_under(folder)
    assert evaluate("bard@10")[0] == 0
    assert evaluated_under(folder) == before
    code, table = evaluate("bard@10", "--again")
    assert (code, evaluated_under(folder)) == (0, [*before, (10, "held-out")])
    assert "this" in table and "bard@20" in table


@pytest.mark.usefixtures("measured")
def test_an_evaluator_that_fails_is_exit_1_and_on_record(evaluate: Evaluate, folder: Path) -> None:
    code, printed = evaluate("bard@20", "--suite", "broken.toml", "--json")
    row = json.loads(printed)["rows"][-1]["evaluation"]
    assert (code, row["status"]) == (1, "failed") and "nothing works" in row["detail"]
    failed = RunLog(LocalStore(folder / "store"), "bard").refresh().failed_evaluations
    assert {item.suite for item in failed} == {"broken"} and len(failed) == 2, "once, and one retry"
