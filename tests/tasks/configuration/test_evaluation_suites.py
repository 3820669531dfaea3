"""Suites as files, and what makes two of them the same."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cairn.tasks.configuration.configuration_source import (
    load_configuration,
    parse_configuration,
    read_suite,
    resolve_evaluation,
)
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.settings import EvaluationConfig
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.evaluator.evaluation_run import required_suites_of, suite_of

MINIMAL: dict[str, Any] = {
    "data": {"sources": ["text.txt"], "tokenizer": "bytes"},
    "training": {"steps": 40, "global_batch": 2, "device": "cpu"},
}
SUITE = """
name = "short"
batches = 3
prompts = ["Once", "The "]
[[evaluators]]
name = "words"
command = "python words.py --lists=more/list.txt {model}"
timeout_seconds = 60
[[evaluators]]
name = "grammar"
command = ["python", "words.py", "--strict"]
required = true
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "more").mkdir()
    (tmp_path / "words.py").write_text("print('{}')\n")
    (tmp_path / "more" / "list.txt").write_text("a list\n")
    (tmp_path / "suite.toml").write_text(SUITE)
    return tmp_path / "suite.toml"


def read(path: Path) -> EvaluationConfig:
    return read_suite(path, EvaluationConfig(every_commits=4, timeout_seconds=9.0))


def parsed(section: dict[str, Any], *overrides: str, folder: Path) -> RunConfig:
    document = {**MINIMAL, "evaluation": section}
    return parse_configuration(document, overrides=overrides, environment={}, name="test", folder=folder)


def identities(path: Path) -> list[str]:
    return [item.sha256 for item in read(path).evaluators]


def test_the_default_suite_is_the_one_that_evaluations_are_made_under_since_small_text_is_measured_whole() -> None:
    assert suite_of(EvaluationConfig()).sha256 == "42628711044d4eb442aafdf69395e149f677d293070cfaf4dce04deddfb7c8b5"


def test_a_suite_file_says_what_is_measured_and_the_configuration_when(suite: Path) -> None:
    found = read(suite)
    assert (found.name, found.batches, found.prompts) == ("short", 3, ("Once", "The "))
    assert (found.batch_size, found.every_commits, found.timeout_seconds) == (16, 4, 9.0)


def test_commands_are_strings_or_lists(suite: Path) -> None:
    words, grammar = read(suite).evaluators
    assert words.command == ("python", "words.py", "--lists=more/list.txt", "{model}")
    assert (grammar.command, grammar.required) == (("python", "words.py", "--strict"), True)


def test_every_file_a_command_names_is_hashed_relative_to_the_suite(suite: Path) -> None:
    words = read(suite).evaluators[0]
    assert words.folder == str(suite.parent) and set(words.files or {}) == {"words.py", "more/list.txt"}


def test_editing_a_script_makes_another_suite(suite: Path) -> None:
    before = identities(suite)
    (suite.parent / "words.py").write_text("print('{}')  # better\n")
    assert not set(before) & set(identities(suite))


def test_editing_a_file_behind_an_option_makes_another_suite(suite: Path) -> None:
    before = identities(suite)
    (suite.parent / "more" / "list.txt").write_text("a longer list\n")
    assert [old == new for old, new in zip(before, identities(suite), strict=True)] == [False, True]


def test_a_suite_that_lies_elsewhere_is_the_same_suite(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before, elsewhere = identities(suite), tmp_path_factory.mktemp("elsewhere")
    suite.parent.rename(elsewhere / "moved")
    assert identities(elsewhere / "moved" / "suite.toml") == before


def test_patience_and_necessity_are_not_what_is_measured(suite: Path) -> None:
    before = identities(suite)
    suite.write_text(SUITE.replace("= 60", "= 61").replace("= true", "= false"))
    assert identities(suite) == before


def test_the_held_out_suite_and_required_evaluators_are_required(suite: Path) -> None:
    assert [item.name for item in required_suites_of(read(suite))] == ["short", "grammar"]


def test_command_is_short_for_one_required_evaluator(suite: Path) -> None:
    found = parsed({"command": "python words.py", "timeout_seconds": 7}, folder=suite.parent).evaluation
    [evaluator] = found.evaluators
    assert (evaluator.name, evaluator.required, evaluator.timeout_seconds) == ("command", True, 7.0)
    assert set(evaluator.files or {}) == {"words.py"}


def test_a_suite_beside_the_keys_it_replaces_is_refused_by_name(suite: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="remove batches, command or suite"):
        parsed({"suite": "suite.toml", "batches": 3, "command": "true"}, folder=suite.parent)


def test_a_bare_name_is_a_suite_of_deployments(tmp_path: Path) -> None:
    found = parsed({"suite": "repetition"}, folder=tmp_path).evaluation
    assert [evaluator.name for evaluator in found.evaluators] == ["repetition"]


@pytest.mark.parametrize("planted", ["repetition", "deployments/suites/repetition.toml"])
def test_no_suite_of_the_working_folder_stands_in_for_cairns_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], planted: str
) -> None:
    (tmp_path / planted).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / planted).write_text("batches = 1\n")
    monkeypatch.chdir(tmp_path)
    found = parsed({"suite": "repetition"}, folder=tmp_path).evaluation
    assert [evaluator.name for evaluator in found.evaluators] == ["repetition"]
    assert str(tmp_path / planted) in capsys.readouterr().err


def test_a_suite_that_is_nowhere_is_answered_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="no such suite file; rule: a path, or one of lm-eval, repetition"):
        parsed({"suite": "repetitoin"}, folder=tmp_path)


def test_a_configuration_names_its_suite_relative_to_itself(suite: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[data]\nsources = ["text.txt"]\n[training]\nsteps = 4\n[evaluation]\nsuite = "suite.toml"\n'
    )
    found = load_configuration(tmp_path / "run.toml", overrides=(), environment={})
    assert [item.name for item in found.evaluation.evaluators] == ["words", "grammar"]


def test_what_stands_in_the_log_needs_no_file_any_more(suite: Path) -> None:
    config = parsed({"suite": "suite.toml"}, folder=suite.parent)
    before = [item.sha256 for item in required_suites_of(config.evaluation)]
    for path in (suite, suite.parent / "words.py"):
        path.unlink()
    again = parse_configuration(config.document(), overrides=(), environment={}, name="log", folder=suite.parent)
    assert [item.sha256 for item in required_suites_of(again.evaluation)] == before


def test_a_suite_set_on_the_command_line_replaces_what_the_log_measures(suite: Path) -> None:
    document = parsed({"batches": 9, "command": "true"}, folder=suite.parent).document()
    found = parse_configuration(
        document, overrides=("evaluation.suite=suite.toml",), environment={}, name="log", folder=suite.parent
    )
    assert (found.evaluation.batches, [item.name for item in found.evaluation.evaluators]) == (3, ["words", "grammar"])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("every_commits = 3", "every_commits: unknown; rule: a suite has name, batches"),
        ("batches = 0", "batches = 0: must be a whole number above 0"),
        ("[[evaluators]]\nname = 'a'\ncommand = ''", "evaluators.0.command"),
        ("[[evaluators]]\nname = 'a'\ncommand = 'echo \"'", "No closing quotation"),
        ("[[evaluators]]\nname = 'held-out'\ncommand = 'true'", "held-out: every suite needs a name of its own"),
        ("[[evaluators]]\nname = 'a/b'\ncommand = 'true'", "evaluators.0.name"),
        ("batches = ", "not readable as TOML"),
    ],
)
def test_a_suite_file_that_breaks_a_rule_is_refused_naming_it(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(TaskError, match=r"bad\.toml") as refused:
        read(tmp_path / "bad.toml")
    assert rule in str(refused.value)


def test_a_suite_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"gone\.toml: no such suite file"):
        parsed({"suite": "gone.toml"}, folder=tmp_path)


def test_what_reading_fills_in_cannot_be_given_by_half() -> None:
    with pytest.raises(ValidationError, match="leave both out"):
        EvaluationConfig.model_validate({"evaluators": [{"name": "a", "command": "true", "folder": "somewhere"}]})


def test_reading_twice_changes_nothing(suite: Path) -> None:
    once = read(suite)
    assert resolve_evaluation(once, suite.parent / "more") == once
