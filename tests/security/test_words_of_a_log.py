"""A hostile log says what a run is, and nothing of what only this machine may say: commands, folders, endpoints, files.

The log was written by somebody else; this machine continues the run by its id.
"""

import os
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cairn.flows.operations.checkpoint_operations import measure
from cairn.model.data.tokenizer import Tokenizer
from cairn.reports.queries.run_lookup import find_checkpoint
from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_entries import AttemptEnded, EvaluationFailed
from cairn.tasks.configuration.settings import EvaluatorConfig
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from cairn.tasks.evaluator.evaluation_run import refuse_command
from cairn.tasks.policy.failures import ErrorKind, Evidence, ExceptionReport
from tests.entries import refusals
from tests.security.recording_server import RecordingServer, recording_server
from tests.wiring.flow_in_process import CONFIG, RUN, FlowWorld, answer_for_evaluators, end_with

pytestmark = pytest.mark.xdist_group("hostile-log")  # its run is continued once for all its tests
SECRET = "machine example.org login me password canary-of-a-file"
BAD_DATA = ExceptionReport(kind=ErrorKind.BAD_DATA, exception="E", message="a hash", traceback=(), step=3, windows=(1,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """A run of a hostile log after this machine has continued it, and what that printed."""

    world: FlowWorld
    server: RecordingServer
    printed: str


def hostile_words(folder: Path, url: str) -> tuple[str, ...]:
    """Return settings that name a server, a folder, a file and a command of this machine."""
    (folder / "netrc").write_text(SECRET)
    score = f'{{name = "score", command = ["touch", "{folder / "trace"}"], required = true}}'
    return (
        f"exporters.mlflow={url}",
        f"exporters.tensorboard={folder / 'board'}",
        f"preemption.notice_file={folder / 'netrc'}",
        f"evaluation.evaluators=[{score}]",
    )


def leave_log(world: FlowWorld, *words: str) -> None:
    """Leave the log of a run whose first attempt had these settings and was preempted; no exporter ran."""
    with world.opened(*words) as run:
        end_with(run, Evidence(stop_signal="SIGTERM"))


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Continued]:
    """The run of a hostile log, continued by its id to its end."""
    world, printed = FlowWorld(tmp_path_factory.mktemp("hostile")), StringIO()
    with pytest.MonkeyPatch.context() as patch, recording_server() as server:
        answer_for_evaluators(patch, world)
        leave_log(world, *hostile_words(world.folder, server.url))
        with redirect_stderr(printed):
            world.train(text="")
    yield Continued(world=world, server=server, printed=printed.getvalue())


def test_a_server_that_only_the_log_names_is_not_contacted(continued: Continued) -> None:
    assert continued.server.requests == []


def test_a_folder_that_only_the_log_names_is_not_written(continued: Continued) -> None:
    assert not (continued.world.folder / "board").exists()


def test_a_file_that_only_the_log_names_is_not_read(continued: Continued) -> None:
    store = continued.world.store
    assert not any(b"canary-of-a-file" in store.read(key) for key in store.keys("runs"))
    assert continued.world.log.state.finished is not None, "it would have been a preemption notice"


def test_a_command_that_only_the_log_names_is_not_run_and_the_record_says_why(continued: Continued) -> None:
    specs = continued.world.evaluators.specs
    assert specs and not [spec for spec in specs if "command" in spec["plan"]["suite"]]
    details = {failed.detail for failed in continued.world.log.state.failed_evaluations if failed.suite == "score"}
    assert details == {
        "evaluator score: only the run's log names its command, so it was not run; name it in this machine's "
        "configuration or with --suite, or set CAIRN_EVALUATOR_COMMANDS=log to run the commands of logs"
    }


def test_a_gate_that_needs_such_a_command_says_no(continued: Continued) -> None:
    offers = Registry(continued.world.store, "champion").refresh()
    assert offers.champion is None
    assert [(refusal.gate, "score" in refusal.detail) for refusal in refusals(offers)] == [("evaluated", True)]


def test_one_line_says_what_was_not_taken_from_the_log(continued: Continued) -> None:
    [line] = [line for line in continued.printed.splitlines() if "not taken from" in line]
    for named in ("exporters.mlflow", "exporters.tensorboard", "preemption.notice_file", "evaluator score", "--set"):
        assert named in line


def test_an_evaluation_from_the_log_alone_runs_no_command(
    continued: Continued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_CACHE", str(continued.world.folder / "cache"))
    measured = measure(find_checkpoint(continued.world.store, RUN), suite="", again=False)
    [score] = [outcome for outcome in measured if outcome.suite == "score"]
    assert isinstance(score, EvaluationFailed) and "only the run's log names its command" in score.detail
    assert not (continued.world.folder / "trace").exists()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlowWorld:
    world = FlowWorld(tmp_path)
    answer_for_evaluators(monkeypatch, world)
    return world


def commands_given(world: FlowWorld) -> list[Any]:
    return [spec["plan"]["suite"]["command"] for spec in world.evaluators.specs if "command" in spec["plan"]["suite"]]


def test_the_configuration_given_on_this_machine_is_honoured_whatever_the_log_says(world: FlowWorld) -> None:
    with recording_server() as server:
        words = hostile_words(world.folder, server.url)[1:2] + hostile_words(world.folder, server.url)[3:]
        leave_log(world, *words)
        world.train(*words)
    assert (world.folder / "board").exists() and commands_given(world)


def test_what_the_environment_of_this_machine_names_is_honoured_without_a_configuration(
    world: FlowWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_log(world)
    monkeypatch.setenv("CAIRN_EXPORTERS__TENSORBOARD", str(world.folder / "board"))
    with world.opened(text="") as run:
        assert run.config.exporters.tensorboard == str(world.folder / "board")


def test_an_operator_may_let_the_commands_of_logs_run(world: FlowWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_log(world, *hostile_words(world.folder, "http://127.0.0.1:9")[3:])
    monkeypatch.setenv("CAIRN_EVALUATOR_COMMANDS", "log")
    with world.opened(text="") as run:
        [suite] = [plan.suite for plan in run.evaluation.following]
    assert isinstance(suite, EvaluatorConfig) and suite.command == ("touch", str(world.folder / "trace"))
    assert refuse_command(suite, os.environ) == ""


def test_nothing_in_a_log_makes_a_reader_open_a_suite_or_hash_a_file(tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text('[[evaluators]]\nname = "own"\ncommand = "true"\n')
    for evaluation in ({"suite": str(tmp_path / "suite.toml")}, {"command": ["touch", str(tmp_path / "trace")]}):
        frozen = {"data": {"sources": ["a"]}, "training": {"steps": 1}}
        read = parse_stored_configuration({**frozen, "evaluation": evaluation})
        assert (read.evaluation.suite, read.evaluation.command, read.evaluation.evaluators) == ("", (), ())


def test_a_run_that_is_continued_from_its_log_opens_no_source_and_no_tokenizer_that_it_names(world: FlowWorld) -> None:
    given = world.folder / "tokenizer.json"
    given.write_text(Tokenizer.bytes().json)
    leave_log(world, f"data.tokenizer={given}")
    for path in (given, world.folder / "text.txt"):
        path.unlink()
    with world.opened(text="") as run:
        assert run.config.data.tokenizer == str(given)


def damaged_end(world: FlowWorld, text: str) -> AttemptEnded:
    """Damage a shard of a new run's snapshot, and return how an attempt ends that found it."""
    leave_log(world)
    [key] = [key for key in world.store.keys("data") if "train-" in key]
    data = bytearray(world.store.read(key))
    data[len(data) // 2] ^= 1
    world.store.write(key, bytes(data))
    with world.opened(text=text) as run:
        return end_with(run, Evidence(last_words=BAD_DATA))


def test_a_damaged_shard_is_not_rebuilt_from_sources_that_only_the_log_names(world: FlowWorld) -> None:
    ended = damaged_end(world, text="")
    assert "only the run's log names its text" in ended.detail


def test_a_damaged_shard_is_rebuilt_from_sources_that_this_machine_names(world: FlowWorld) -> None:
    assert damaged_end(world, text=CONFIG).decision.changed == "damaged train-00000.arrow rebuilt from source"
