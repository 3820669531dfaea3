"""`import cairn`: what the page and the notebook about it show, run as it stands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cairn
from cairn.reports.errors import RunNotFound
from cairn.reports.queries.run_tables import columns
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.step_log import StepRecord, step_log_key
from cairn.storage.stores.codec import encode
from cairn.storage.stores.local_store import LocalStore
from tests.commands import ROOT, chosen_folders
from tests.writing_run import RUN, WritingRun, open_writing_run

PAGE = ROOT / "docs" / "how-to" / "python.md"
NOTEBOOK = ROOT / "docs" / "how-to" / "python.ipynb"
HEAVY = "torch", "prefect", "pyarrow", "pydantic", "duckdb"
AS_A_KERNEL = """
import asyncio, sys

async def run(cells):  # as in a notebook, a loop is running
    names = {}
    for cell in cells:
        exec(compile(cell, "<cell>", "exec"), names)

asyncio.run(run(sys.argv[1:]))
print(sorted({"torch", "prefect"} & set(sys.modules)))
"""
TEXT = "\n\n".join(f"paragraph {number} of the text" for number in range(60))
CONFIGURATION = """
[data]
sources = ["text.txt"]
tokenizer = "bytes"
[model]
n_layer = 1
n_head = 1
n_embd = 8
block_size = 8
[training]
steps = 8
global_batch = 2
device = "cpu"
[checkpoint]
every_steps = 2
"""


@pytest.fixture
def bard(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WritingRun:
    """A run with one attempt, two commits and two steps on record, in the chosen store."""
    for name, value in chosen_folders(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CAIRN_STORE", store.url)
    monkeypatch.chdir(tmp_path)
    run = open_writing_run(store, tmp_path)
    run.start()
    values = dict.fromkeys(("lr", "grad_norm", "tokens_per_second", "mfu", "seconds"), 0.5)
    for step in (1, 2):
        run.commit(step)
    lines = [
        StepRecord(
            step=n, attempt=1, train_loss=3.0 - n, memory_bytes=1, probe_loss=None, sample=None, tokens=n, **values
        )
        for n in (1, 2)
    ]
    store.write(step_log_key(run.log.prefix, 1), b"".join(encode(line).replace(b"\n", b"") + b"\n" for line in lines))
    return run


def snippets(*, train: bool) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [snippet for snippet in found if ("cairn.train(" in snippet) == train]


def test_importing_it_imports_nothing_heavy() -> None:
    code = f"import sys, cairn; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_snippets_of_the_page_run_as_they_stand(bard: WritingRun, store: LocalStore) -> None:
    names: dict[str, object] = {}
    code = "".join(snippets(train=False)).replace("./cairn-store", store.url)
    exec(code, names)
    assert names["text"] == "To be" and names["reasons"] == [None]


def run_notebook(*, with_network: bool) -> subprocess.CompletedProcess[str]:
    """Run the cells of the notebook beside a running loop in a new process; says last whether that imported Prefect."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    chosen = [source for source in sources if with_network or "import torch" not in source]
    assert len(chosen) >= 5
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", AS_A_KERNEL, *chosen]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_tables_of_the_notebook_are_read_without_torch_and_prefect(bard: WritingRun) -> None:
    done = run_notebook(with_network=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr


@pytest.mark.slow  # torch is imported in a new process; the page's snippets above do the same in this one
def test_every_cell_of_the_notebook_runs_as_it_stands(bard: WritingRun) -> None:
    done = run_notebook(with_network=True)
    assert done.returncode == 0 and "torch.Size" in done.stdout, done.stderr


def test_every_table_of_a_run_has_the_columns_of_its_sql_table(bard: WritingRun) -> None:
    run, store = cairn.open().run(RUN), cairn.open()
    tables = {
        "training_attempts": run.attempts,
        "checkpoints": run.checkpoints,
        "evaluations": run.evaluations,
        "steps": run.curve,
    }
    for name, table in tables.items():
        answer = store.sql(f"select * from {name}")
        assert table.column_names[: len(columns(name))] == [column.name for column in columns(name)]
        assert table.num_rows == answer.num_rows, name


def test_a_table_that_is_asked_for_again_has_what_was_committed_meanwhile(bard: WritingRun) -> None:
    run = cairn.open().run(RUN)
    assert run.checkpoints["step"].to_pylist() == [1, 2]
    bard.commit(3)
    assert run.checkpoints["step"].to_pylist() == [1, 2, 3] and run.status.newest_committed_step == 3


def test_a_network_is_that_of_the_step_and_in_evaluation_mode(bard: WritingRun) -> None:
    other = bard.commit(3, seed=1)
    run = cairn.open().run(RUN)
    first, newest = run.load_model(1), run.load_model()
    assert not first.training and not newest.training and other.step == 3
    pairs = zip(first.parameters(), newest.parameters(), strict=True)
    assert any(bool((a != b).any()) for a, b in pairs)


def test_a_network_with_a_changed_byte_is_not_given_out(bard: WritingRun, store: LocalStore) -> None:
    reference = bard.commit(3)
    key = next(key for key in store.keys(reference.prefix) if "weights" in key)
    data = bytearray(store.read(key))
    data[-1] ^= 1
    store.write(key, bytes(data))
    with pytest.raises(IntegrityError):
        cairn.open().run(RUN).load_model()


def test_a_run_that_is_not_there_is_answered_with_those_that_are(bard: WritingRun) -> None:
    with pytest.raises(RunNotFound, match=RUN):
        cairn.open().run("brad")


def test_an_empty_answer_keeps_its_columns(bard: WritingRun) -> None:
    answer = cairn.open().sql("select run_id, step from runs where step > 99")
    assert answer.column_names == ["run_id", "step"] and answer.num_rows == 0


def test_training_that_is_refused_raises_the_commands_words_and_exit_code(
    bard: WritingRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bard.toml").write_text(CONFIGURATION)
    with pytest.raises(cairn.TrainingStopped, match="seed") as caught:
        cairn.train("bard.toml", settings={"training.seed": 7})
    assert caught.value.exit_code == 6
    assert str(caught.value) in capsys.readouterr().err


@pytest.mark.slow  # a whole training with its server; the refusal above goes the same way to the command
def test_the_page_s_training_trains_and_returns_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in chosen_folders(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "bard.toml").write_text(CONFIGURATION)
    names: dict[str, object] = {"cairn": cairn}
    exec("".join(snippets(train=True)), names)
    run = names["run"]
    assert isinstance(run, cairn.Run) and run.status.state == "finished"
    assert run.curve["step"].to_pylist() == [1, 2, 3, 4]
    assert "bard" in capsys.readouterr().err
