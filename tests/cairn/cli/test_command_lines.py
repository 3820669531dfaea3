"""Two hundred mistakes: each is answered in one line that says what is wrong and what to do next, with CONTRACT's code.

Nothing is started: nobody listens where the orchestrator is said to be, so a command that went there would end with
another code. That it is not even imported is in `test_real_commands`.
"""

import json
import logging
import re
import shlex
import time
from pathlib import Path

import pytest

from cairn.tasks.errors import TaskError
from cairn.tasks.machine.machine_speed import may_have_cuda
from tests.cairn.cli.command_lines import CODES, READING, TRAINING, WITHOUT_CUDA
from tests.cairn.command_folder import furnish
from tests.commands import Ended, chosen_folders, run_here
from tests.file_ceilings import slowness

LINES = {**READING, **TRAINING}
MOST_PROCESSOR_SECONDS = 2.0
FOREIGN = re.compile(r"Input should|[Pp]ydantic|Traceback|\[Errno|further information|\\Z|A-Za-z|Unused Tok")
NOBODY = {"PREFECT_API_URL": "http://127.0.0.1:9/api", "no_proxy": "*"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("newcomer")
    furnish(path)
    return path


def typed(line: str, folder: Path) -> Ended:
    words = shlex.split(line)
    variables = dict[str, str](NOBODY)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return run_here(tuple(words), folder, variables)


def timed(line: str, folder: Path) -> tuple[Ended, float]:
    """How it ended, and the processor seconds it took."""
    began = time.process_time()
    return typed(line, folder), time.process_time() - began


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_is_answered_in_one_line_of_our_own_words(folder: Path, line: str) -> None:
    code, words = CODES.get(line, 2), LINES[line]
    ended, seconds = timed(line, folder)
    most = MOST_PROCESSOR_SECONDS * slowness()
    if seconds >= most:  # the first that needs a library imports it
        ended, seconds = timed(line, folder)
    lines = ended.err.splitlines()
    assert (ended.code, words in ended.err, FOREIGN.findall(ended.err)) == (code, True, []), ended.err
    assert lines[0].startswith("cairn: ") and seconds < most
    assert len(lines) == 1 or code == 6 or "empty.toml" in line, "a configuration has a line for each broken rule"
    assert ended.out == "" or "--dry-run" in line, "the plan of a dry run says what does not fit"


@pytest.mark.skipif(may_have_cuda(), reason="a GPU may be there")
@pytest.mark.parametrize("line", WITHOUT_CUDA)
def test_a_device_that_is_not_there_is_refused_before_anything_starts(folder: Path, line: str) -> None:
    ended = typed(line, folder)
    assert (ended.code, ended.out) == (2, "") and WITHOUT_CUDA[line] in ended.err


@pytest.mark.parametrize("line", [line for line in LINES if "secret" in line])
def test_no_refusal_repeats_a_secret(folder: Path, line: str) -> None:
    assert "secret" not in typed(line, folder).err


def test_a_refused_command_leaves_no_run(folder: Path) -> None:
    typed("train run.toml --set model.block_size=5000", folder)
    assert [run["run_id"] for run in json.loads(typed("runs --json", folder).out)] == ["bard"]


def test_an_error_nobody_foresaw_has_its_traceback_and_its_own_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.reports.queries.run_status.list_runs", lambda store: 1 / 0)
    ended = typed("runs", folder)
    assert ended.code == 1 and "ZeroDivisionError" in ended.err


@pytest.mark.parametrize(
    "override", ["training.stepz=4", "training.lr=0", 'data.sources=["gone.txt"]', "model.n_embd=1048576"]
)
def test_a_dry_run_a_command_and_a_deployed_run_say_the_same(
    folder: Path, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cairn.flows import train_gpt as chain

    monkeypatch.setattr(chain, "get_run_logger", logging.getLogger)
    line = f"train run.toml --set '{override}'"
    told = [typed(spoken, folder).err.splitlines()[-1] for spoken in (line, f"{line} --dry-run")]
    for name, value in chosen_folders(folder).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TaskError) as refused:  # what Prefect would run, without an orchestrator
        chain.train_gpt.fn(config=str(folder / "run.toml"), overrides=(override,))
    deployed = str(refused.value).replace(f"{folder}/run.toml", "run.toml")
    without_numbers = [re.sub(r"[\d.e+]+ GB", "", text) for text in (*told, f"cairn: {deployed}")]
    assert len(set(without_numbers)) == 1, without_numbers
