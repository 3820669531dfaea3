"""Evaluators of one's own that crash, hang, lie and snoop, as real commands."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.tasks.configuration.configuration_source import resolve_evaluation
from cairn.tasks.configuration.settings import EvaluationConfig, EvaluatorConfig
from cairn.tasks.errors import TaskError
from cairn.tasks.evaluator import evaluator
from cairn.tasks.evaluator.evaluation_run import EvaluationSpec, refuse_command
from cairn.tasks.evaluator.evaluator import command_environment, parse_metrics, run_command
from tests.tasks.evaluation_spec import evaluation_spec

Script = Callable[..., EvaluatorConfig]


@pytest.fixture
def spec(tmp_path: Path) -> EvaluationSpec:
    return evaluation_spec(tmp_path)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """A suite of one Python script with this text."""

    def made(text: str, *arguments: str) -> EvaluatorConfig:
        (tmp_path / "score.py").write_text(text)
        section = {"evaluators": [{"name": "score", "command": ["python", "score.py", *arguments]}]}
        return resolve_evaluation(EvaluationConfig.model_validate(section), tmp_path).evaluators[0]

    return made


def test_nested_numbers_become_names_with_slashes(script: Script, spec: EvaluationSpec) -> None:
    suite = script('print(\'{"acc": 0.5, "by": {"topic": {"law": 3}}}\')')
    assert run_command(suite, spec).metrics == {"acc": 0.5, "by/topic/law": 3.0}


@pytest.mark.parametrize("said", ["refuse", "no", ""])
def test_a_machine_that_does_not_allow_commands_refuses_every_one(script: Script, said: str) -> None:
    problem = refuse_command(script("pass"), {"CAIRN_EVALUATOR_COMMANDS": said})
    assert problem.startswith("evaluator score: this machine runs no evaluator's command")


@pytest.mark.parametrize(("said", "is_refused"), [({}, True), ({"CAIRN_EVALUATOR_COMMANDS": "log"}, False)])
def test_a_command_of_a_log_is_refused_unless_the_operator_lets_it_run(
    script: Script, said: dict[str, str], is_refused: bool
) -> None:
    named = script("pass")
    logged = named.model_copy(update={"logged": True})
    assert (refuse_command(named, said), bool(refuse_command(logged, said))) == ("", is_refused)


def test_the_model_is_the_last_argument_unless_it_is_placed(script: Script, spec: EvaluationSpec) -> None:
    text = "import sys, os; print('{\"n\": %d}' % (sys.argv.index(os.environ['CAIRN_MODEL_DIR'])))"
    assert run_command(script(text, "--fast"), spec).metrics == {"n": 2.0}
    assert run_command(script(text, "{model}", "--fast"), spec).metrics == {"n": 1.0}
    inside = "import sys, os; print('{\"n\": %d}' % (sys.argv[1] == 'in=' + os.environ['CAIRN_MODEL_DIR']))"
    assert run_command(script(inside, "in={model}"), spec).metrics == {"n": 1.0}


def test_the_command_runs_in_the_suites_folder_with_nothing_to_read(script: Script, spec: EvaluationSpec) -> None:
    text = "import sys, os; print('{\"same\": %d}' % (os.path.exists('score.py') and sys.stdin.read() == ''))"
    assert run_command(script(text), spec).metrics == {"same": 1.0}


def test_python_is_the_interpreter_of_the_project(script: Script, spec: EvaluationSpec) -> None:
    text = f"import sys; print('{{\"same\": %d}}' % (sys.prefix == {sys.prefix!r}))"
    assert run_command(script(text), spec).metrics == {"same": 1.0}


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        pytest.param("epoch 1 …", "printed nonsense", id="words"),
        pytest.param('{"a": NaN}', "printed nonsense", id="NaN"),
        pytest.param('{"a": 1e999}', "printed nonsense", id="infinity"),
        pytest.param('{"a": null}', "a is 'None'; rule: every value is a finite number", id="null"),
        pytest.param('{"a": {"b": "0.5"}}', "a/b is '0.5'; rule", id="text"),
        pytest.param('{"a": true}', "a is 'True'; rule", id="truth"),
        pytest.param('{"a": [1, 2]}', "a is '[1, 2]'; rule", id="list"),
        pytest.param('{"a": 1' + "0" * 400 + "}", "printed nonsense", id="beyond floats"),
        pytest.param("[0.5]", "rule: stdout is one JSON object", id="no object"),
        pytest.param("{}", "0 numbers; rule: 1 to 1000", id="empty"),
        pytest.param("", "rule: stdout is one JSON object", id="nothing"),
        pytest.param('{"a": 1}\n{"a": 2}', "rule: stdout is one JSON object", id="two"),
    ],
)
def test_what_is_wrong_is_said_in_words(printed: str, problem: str) -> None:
    with pytest.raises(TaskError) as failed:
        parse_metrics("score", printed.encode())
    assert problem in str(failed.value) and "score" in str(failed.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("import sys; sys.exit('no harness here')", "exited with 1: no harness here", id="crash"),
        pytest.param("print('epoch 1')", "printed nonsense", id="words"),
        pytest.param("import os\nwhile True: os.write(1, b'1' * 65536)", "more than 1,048,576 bytes", id="flood"),
    ],
)
def test_a_command_that_fails_or_prints_nonsense_is_named(
    script: Script, spec: EvaluationSpec, text: str, problem: str
) -> None:
    with pytest.raises(TaskError, match=rf"score.*{problem}"):
        run_command(script(text), spec)


def test_a_program_that_is_not_there_is_named(tmp_path: Path, spec: EvaluationSpec) -> None:
    suite = EvaluatorConfig(
        name="score",
        command=("no-such-program-anywhere",),
        folder=str(tmp_path),
        timeout_seconds=1.0,
        files={},
    )
    with pytest.raises(TaskError, match="no-such-program-anywhere: cannot be started"):
        run_command(suite, spec)


def test_a_script_that_was_edited_is_not_the_suites_any_more(script: Script, spec: EvaluationSpec) -> None:
    suite = script("print('{\"a\": 1}')")
    script("print('{\"a\": 2}')")
    with pytest.raises(TaskError, match=r"score\.py: sha256 .* it was edited"):
        run_command(suite, spec)


def test_the_command_is_told_whose_weights_these_are(spec: EvaluationSpec) -> None:
    told = command_environment({"PATH": "/bin"}, spec)
    assert (told["CAIRN_RUN_ID"], told["CAIRN_STEP"], told["CAIRN_MANIFEST_SHA256"]) == ("bard", "7", "m" * 64)
    assert told["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]


@pytest.mark.parametrize("name", ["HOME", "LANG", "TOKENIZERS_PARALLELISM", "HF_HOME", "CUDA_VISIBLE_DEVICES"])
def test_variables_that_evaluators_need_reach_the_command(spec: EvaluationSpec, name: str) -> None:
    assert command_environment({name: "x"}, spec)[name] == "x"


def test_more_numbers_than_anybody_reads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "MOST_METRICS", 2)
    with pytest.raises(TaskError, match="3 numbers; rule: 1 to 2"):
        parse_metrics("score", json.dumps({"a": 1, "b": 2, "c": 3}).encode())
