"""`cairn fork` on a copy of the run nobody touched, with the real commands."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from cairn.reports.plots.run_curves import gather_curves
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import StepRecord, read_step_records, splice
from tests.commands import run_here
from tests.crash.training_command import RUN, STEPS, Command
from tests.processes.waiting import patience_seconds

pytestmark = pytest.mark.xdist_group("undisturbed")
TWIN = "twin"


@pytest.fixture
def command(undisturbed: Command, tmp_path: Path, api_url: str) -> Command:
    """A command whose store holds a copy of the finished run."""
    shutil.copytree(undisturbed.folder / "store", tmp_path / "store")
    return Command(tmp_path, api_url)


def fork(command: Command, reference: str, *settings: str, name: str = TWIN) -> None:
    ended = run_here(("fork", reference, name, *settings, "--store", command.store.url), command.folder, {})
    assert ended.code == 0, ended.err


def train(command: Command, *settings: str, name: str = TWIN, **variables: str) -> int:
    return command.start_verb("train", "--run-id", name, *settings, **variables).wait(timeout=patience_seconds())


def state_of(command: Command, run: str = TWIN) -> RunState:
    return RunLog(command.store, run).refresh()


def test_an_unchanged_fork_ends_with_its_parents_digest(command: Command) -> None:
    fork(command, f"{RUN}@{STEPS - 5}")
    assert train(command) == 0, command.output()
    ended, parent = state_of(command).finished, state_of(command, RUN).finished
    assert ended is not None and parent is not None and ended.state_sha256 == parent.state_sha256
    status = json.loads(run_here(("status", TWIN, "--json", "--store", command.store.url), command.folder, {}).out)
    assert status["forked_from"] == f"{RUN}@{STEPS - 5}"


@pytest.mark.slow  # its quicker witness is the test above
def test_a_fork_with_more_steps_killed_before_its_first_commit_begins_again_with_its_parents_checkpoint(
    command: Command,
) -> None:
    fork(command, RUN, "--set", f"training.steps={STEPS + 10}", "--set", "checkpoint.every_steps=5")
    assert train(command, CAIRN_FAULTS=f"kill@{STEPS + 3}") == 0, command.output()
    attempts = state_of(command).attempts
    assert [item.started.resumed_from for item in attempts] == [state_of(command).beginning] * 2
    assert state_of(command).newest_committed.committed.step == STEPS + 10  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_fork_with_other_text_keeps_the_tokens_of_its_parent(command: Command) -> None:
    (command.folder / "mine.txt").write_text("Stone upon stone the cairn is built.\n" * 200)
    fork(command, RUN, "--set", 'data.sources=["mine.txt"]', "--set", f"training.steps={STEPS + 5}")
    assert train(command) == 0, command.output()
    opened, parent = state_of(command).opened, state_of(command, RUN).opened
    assert opened is not None and parent is not None and opened.data_snapshot != parent.data_snapshot


@pytest.mark.slow
def test_a_fork_with_another_batch_that_is_killed_goes_on_with_its_parents_samples_and_counters(
    command: Command,
) -> None:
    batch = command_batch(command)
    fork(command, f"{RUN}@{STEPS - 5}", "--set", f"training.global_batch={2 * batch}")
    assert train(command, CAIRN_FAULTS=f"kill@{STEPS - 2}") == 0, command.output()
    (before, *_), own = records_of(command, RUN), records_of(command, TWIN)
    each = before.tokens or 0
    assert [record.tokens for record in own] == [each * (STEPS - 5 + 2 * place) for place in range(1, 6)]
    replayed = run_here(("replay", TWIN, "--json", "--store", command.store.url), command.folder, {})
    assert set(json.loads(replayed.out)["outcomes"].items()) >= {("different", 0), ("unreadable", 0)}


@pytest.mark.slow
def test_a_fork_of_forks_that_are_killed_and_swept_ends_with_the_digest_of_the_first_and_its_plot_names_them_all(
    command: Command,
) -> None:
    line = [RUN, "second", "third", "fourth"]
    for place, (before, name) in enumerate(pairwise(line)):
        step = STEPS - 10 + 3 * place
        keep = ("--set", "checkpoint.every_steps=1", "--set", "checkpoint.keep_last=9")
        fork(command, f"{before}@{step}", *keep, name=name)
        assert train(command, name=name, CAIRN_FAULTS=f"kill@{step + 2}") == 0, command.output()
    ended = run_here(("plot", line[-1], "plot.svg", "--store", command.store.url), command.folder, {})
    assert ended.code == 0, ended.err
    found = gather_curves(log_of(command, line[-1]))
    assert found.ancestors == tuple(line[:-1])
    steps = [point.record.step for point in (*found.inherited, *found.points)]
    assert steps == list(range(1, STEPS + 1))
    digests = {state.finished.state_sha256 for state in (state_of(command, name) for name in line) if state.finished}
    assert len(digests) == 1


def log_of(command: Command, run: str) -> RunLog:
    log = RunLog(command.store, run)
    log.refresh()
    return log


def command_batch(command: Command) -> int:
    opened = state_of(command, RUN).opened
    assert opened is not None
    return int(opened.config["training"]["global_batch"])


def records_of(command: Command, run: str) -> list[StepRecord]:
    """Return the surviving steps of a run."""
    lines = read_step_records(command.store, f"runs/{run}", state_of(command, run).attempts)
    return [point.record for point in splice(lines, state_of(command, run).attempts)]
