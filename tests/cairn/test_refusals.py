"""What is refused is refused in one line that says what is wrong and what to do next, with the code of CONTRACT."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.cli.command import run_command
from tests.fabricated_run import FabricatedRun

REFUSALS: dict[str, tuple[int, str]] = {
    "statsu": (2, 'Did you mean "status"? `cairn --help` lists the commands'),
    "runs --stroe x": (2, "Did you mean --store? `cairn runs --help` shows"),
    "status": (2, "`cairn status --help` shows how it is used"),
    "log bard extra": (2, "`cairn log --help` shows how it is used"),
    "sample bard --tokens many": (2, "`cairn sample --help` shows how it is used"),
    "status nobody": (2, "runs here: bard"),
    "status ../bard": (2, "no '..'"),
    "explain bard --attempt 9": (2, "it has attempts 1 to 2"),
    "sample nobody": (2, "runs here: bard; aliases here: champion"),
    "sample bard@7": (2, "steps here: 10, 20, 30"),
    "sample bard@last": (2, "RUN@STEP with a whole number"),
    "sample bard --temperature -1": (2, "must not be negative"),
    "evaluate bard --suite gone.toml": (2, "gone.toml: no such suite file"),
    "promote bard@30": (3, "gate"),
    "rollback --alias nobody": (2, "`cairn promote` adds to it"),
    "plot bard curve.gif": (2, "must end in .png or .svg"),
    "plot bard gone/curve.png": (2, "make it first"),
    "export bard .": (2, "name a new folder"),
    "data nobody": (2, "snapshots here: none"),
    "data bard": (1, "build it again from its sources"),
    "import-tokens --train a.bin --val b.bin": (2, "--tokenizer, --vocab-size: give one of them"),
    "watch --once --every 0": (2, "must be more than 0 seconds"),
    "simulate nobody": (2, "runs here: bard"),
    "sql selec": (2, "`cairn sql` lists their columns"),
    "train": (2, "say which run to train or continue"),
    "train --run-id nobody": (2, "`cairn runs` lists those there are"),
    "train gone.toml": (2, "gone.toml: no such configuration file"),
    "train broken.toml": (2, "broken.toml: not readable as TOML"),
    "train --run-id bard --set training.steps": (2, "must be section.key=value"),
    "train --run-id bard --set training.steps=50": (
        6,
        "undo the change, start another run with --run-id, or go on from this one",
    ),
    "runs --store file": (2, "choose another --store"),
    "status bard --store file": (2, "choose another --store"),
    "runs --store s4://bucket": (2, "choose another --store"),
    "runs --store ftp://host/x": (2, "s3://BUCKET/PREFIX"),
    "train --run-id bard --store hdfs://host/x": (2, "s3://BUCKET/PREFIX"),
    "runs --store gs://bucket/x": (2, "Google Cloud Storage is not supported"),
    "runs --store az://container/x": (2, "Azure Blob Storage is not supported"),
    "train --run-id bard@7": (2, "must not contain '@'"),
    "status bard@7": (2, "name the run without a step"),
    "runs --store s3://": (2, "s3://bucket"),
    "runs --store s3://key:secret@bucket": (2, "put them into the environment"),
}


@pytest.fixture
def typed(bard: FabricatedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAIRN_STORE", str(tmp_path / "store"))
    (tmp_path / "file").write_text("not a store")
    (tmp_path / "broken.toml").write_text("a = = 1")
    return lambda line: run_command(line.split())


@pytest.mark.parametrize("line", REFUSALS)
def test_a_refusal_is_one_line_that_says_what_to_do(
    typed: Callable[[str], int], capsys: pytest.CaptureFixture[str], line: str
) -> None:
    code, words = REFUSALS[line]
    found, printed = typed(line), capsys.readouterr()
    lines = printed.err.splitlines()
    assert (found, printed.out) == (code, "") and lines[0].startswith("cairn: ") and words in printed.err
    assert len(lines) == 1 or code == 6, "the difference of a configuration has a line for each value"


@pytest.mark.parametrize("line", ["runs --store s3://key:secret@bucket", "train --store s3://key:secret@bucket"])
def test_no_refusal_repeats_a_secret(
    typed: Callable[[str], int], capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert typed(line) == 2 and "secret" not in capsys.readouterr().err


def test_an_error_nobody_foresaw_has_its_traceback_and_its_own_code(
    typed: Callable[[str], int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reports.queries.run_status.list_runs", lambda store: 1 / 0)
    assert typed("runs") == 1 and "ZeroDivisionError" in capsys.readouterr().err
