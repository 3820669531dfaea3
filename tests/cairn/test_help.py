"""What a person meets before the first run: the list of verbs, each verb's help, completion, refusals in one line."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from cairn.cli.app import EXAMPLES, app
from cairn.cli.command import run_command
from cairn.cli.json_fields import RECORDS, describe_fields, find_record
from tests.commands import Cairn

VERBS = sorted(name for name in app if not name.startswith("-"))


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command([*arguments, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_ends_with_an_example_of_it(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    lines = helped(capsys, verb).rstrip().splitlines()
    assert any(line.startswith(f"  cairn {verb}") for line in lines[lines.index("Examples:") :])


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "completion"])
def test_every_verb_can_print_json_and_be_told_its_store(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    options = ("--json",) if verb == "config" else ("--json", "--store")  # the keys are those of no store
    assert all(option in helped(capsys, verb) for option in options)


def test_the_fields_of_every_record_are_described() -> None:
    for line in RECORDS:
        described = set(re.findall(r"\w+", describe_fields(line.split()[0])))
        assert {field.name for field in fields(find_record(line)[0])} - described == set()


@pytest.mark.parametrize("verb", ["attempts", "models", "sql"])
def test_the_help_of_a_verb_names_the_fields_of_its_json(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert describe_fields(verb) in helped(capsys, verb).partition("Examples:")[0]


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_a_verb_name_options_that_it_has(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    text = helped(capsys, verb)
    options = {word for line in EXAMPLES[verb] for word in re.findall(r"(?<=\s)--[a-z-]+", line)}
    assert {option for option in options if option not in text.partition("Examples:")[0]} == set()


def test_no_example_is_wider_than_a_terminal() -> None:
    assert [line for lines in EXAMPLES.values() for line in lines if len(line) > 78] == []


def test_the_list_of_verbs_says_where_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys)
    assert "Start here:\n  cairn train " in text and all(verb in text for verb in VERBS)


def test_training_is_listed_before_everything_else(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys)
    places = [text.index(title) for title in ("─ Train ─", "─ Look at runs ─", "─ Models ─", "─ Store and machine ─")]
    assert places == sorted(places)


def test_an_unknown_shell_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["completion", "tcsh"]) == 2
    assert '"bash", "zsh", "fish"' in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_knows_the_verbs(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert run_command(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [verb for verb in VERBS if verb not in script] == []


@pytest.fixture
def bash(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Completes a line in a real bash that has read the script, as pressing Tab would."""
    if shutil.which("bash") is None:
        pytest.skip("no bash here: completion in it cannot be tried")
    script = tmp_path / "cairn.bash"
    script.write_text(app.generate_completion(shell="bash"))

    def complete(*words: str) -> list[str]:
        code = f"""source {script}
            COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
            COMP_LINE="{" ".join(words)}"; COMP_POINT=${{#COMP_LINE}}
            $(complete -p cairn | sed 's/.*-F \\([^ ]*\\).*/\\1/') cairn '{words[-1]}' '{words[-2]}'
            printf '%s\\n' "${{COMPREPLY[@]}}" """
        command = ["bash", "--norc", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        return sorted(done.stdout.split())

    yield complete


def test_bash_completes_a_verb(bash: Callable[..., list[str]]) -> None:
    assert bash("cairn", "che") == ["checkpoints"]


def test_bash_completes_an_option_of_the_verb(bash: Callable[..., list[str]]) -> None:
    assert bash("cairn", "train", "--run") == ["--run-id"]


def test_bash_completes_a_choice(bash: Callable[..., list[str]]) -> None:
    assert bash("cairn", "completion", "z") == ["zsh"]


def test_completion_is_installed_where_the_shell_looks(cairn: Cairn, tmp_path: Path) -> None:
    ended = cairn("completion", "bash", "--install", "--json", HOME=str(tmp_path))
    assert ended.code == 0, ended.err
    installed = [path for path in tmp_path.rglob("*") if path.is_file() and "_cairn()" in path.read_text()]
    assert len(installed) == 1 and str(installed[0]) in ended.out


def test_an_unwritable_home_is_refused_in_one_line(cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    ended = cairn("completion", "bash", "--install", HOME=str(tmp_path / "home"))
    assert ended.code == 2 and len(ended.err.splitlines()) == 1 and "prints the script" in ended.err
