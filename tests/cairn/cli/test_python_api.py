"""`import cairn`: what the page and the notebook about it show, run as it stands."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import cairn
from cairn.reports.errors import RunNotFound
from cairn.reports.plots import curve_plot
from cairn.reports.queries.run_tables import columns
from cairn.reports.text.display_tables import compared_runs_table
from cairn.storage.errors import IntegrityError
from cairn.storage.stores.local_store import LocalStore
from tests.cairn.command_folder import CONFIGURATION, TEXT
from tests.commands import ROOT, Ended, chosen_folders, run_here, run_python
from tests.fabricated_run import fabricate, write_steps
from tests.processes.fork_server import fork_server
from tests.writing_run import RUN, WritingRun, open_writing_run

PAGE = ROOT / "docs" / "how-to" / "python.md"
NOTEBOOK = ROOT / "docs" / "how-to" / "python.ipynb"
HEAVY = "torch", "prefect", "pyarrow", "pydantic", "duckdb"
AS_A_KERNEL = """
import ast, asyncio, sys, types

class Formatter(dict):  # IPython's for text/html, as far as it is asked
    def for_type_by_name(self, module, name, function):
        self[module, name] = function

html = Formatter()
shell = types.SimpleNamespace(display_formatter=types.SimpleNamespace(formatters={"text/html": html}))
sys.modules["ipykernel"] = types.ModuleType("ipykernel")
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell, version_info=(9, 0))

def shown(value):
    by_type = html.get((type(value).__module__, type(value).__name__))
    if hasattr(value, "_repr_png_"):
        return f"PNG of {len(value._repr_png_())} bytes"
    return by_type(value) if by_type else value._repr_html_()

async def run(cells):  # as in a notebook, a loop is running
    names = {}
    for cell in cells:
        *body, last = ast.parse(cell).body
        is_shown = isinstance(last, ast.Expr) and "print" not in cell
        exec(compile(ast.Module(body if is_shown else [*body, last], []), "<cell>", "exec"), names)
        if is_shown:
            print(shown(eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)))

asyncio.run(run(sys.argv[1:]))
print(sorted({"torch", "prefect"} & set(sys.modules)))
"""
READING = "import cairn; store = cairn.open(); run = store.run('bard')"


@pytest.fixture
def bard(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WritingRun:
    """A run with one attempt, two commits and two steps on record, in the chosen store."""
    for name, value in chosen_folders(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CAIRN_STORE", store.url)
    monkeypatch.chdir(tmp_path)
    run = open_writing_run(store, tmp_path)
    run.start()
    for step in (1, 2):
        run.commit(step)
    write_steps(run.log, 1, (1, 2), train_loss=lambda step: 3.0 - step, tokens=lambda step: step)
    return run


def snippets(*, train: bool) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [snippet for snippet in found if ("cairn.train(" in snippet) == train]


def test_importing_it_imports_nothing_heavy(tmp_path: Path) -> None:
    code = f"import sys, cairn; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    assert run_python(("-c", code), tmp_path, {}) == Ended(code=0, out="\n", err="")


def test_the_snippets_of_the_page_run_as_they_stand(bard: WritingRun, store: LocalStore) -> None:
    names: dict[str, object] = {}
    code = "".join(snippets(train=False)).replace("./cairn-store", store.url)
    exec(code, names)
    assert names["text"] == "To be" and names["reasons"] == [None]


def cells() -> list[str]:
    """Return the code of the notebook's cells."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def run_cells(chosen: list[str], folder: Path, **variables: str) -> Ended:
    """Run cells as a notebook does, in a new process; carriage returns stay, as a notebook gets them."""
    environment = {**os.environ, **chosen_folders(folder), "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", AS_A_KERNEL, *chosen]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    return Ended(code=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())


def test_what_the_notebook_reads_is_shown_as_html_and_pictures_without_torch_and_prefect(
    bard: WritingRun, tmp_path: Path
) -> None:
    others = ("cairn.train(", "run.sample(", "store.compare(", "import torch")
    reading = [cell for cell in cells() if not any(word in cell for word in others)]
    done = run_cells([READING, *reading], tmp_path)
    assert (done.code, done.out.splitlines()[-1:]) == (0, ["[]"]), done.err
    kinds = [line.partition(">")[0].split()[0] for line in done.out.splitlines()[:-1]]
    assert kinds.count("PNG") == 1 and kinds.count("<table") == len(reading) - 1 >= 5


@pytest.mark.slow  # three trainings with their servers; the reading cells above and the page's snippets are quicker
def test_every_cell_of_the_notebook_runs_as_it_stands_in_an_empty_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "empty").mkdir()
    done = run_cells(cells(), folder, CAIRN_STORE="", FORCE_COLOR="1")  # as a kernel does
    assert done.code == 0 and "torch.Size" in done.out, done.err
    assert done.out.count("PNG of ") == 1 and "rates.lr=0.006" in done.out
    # A step's line ends without a newline, so that the next line takes its place; no terminal's codes are printed.
    assert re.search(r"\rstep 1/300 [^\r\n]*\r", done.out) and "\x1b" not in done.out


def test_a_picture_is_that_of_the_command(bard: WritingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[inspect.BoundArguments]()
    signature = inspect.signature(curve_plot.draw_run)

    def draw(*given: Any, **named: Any) -> bytes:
        drawn.append(signature.bind(*given, **named))
        drawn[-1].apply_defaults()
        return b"a picture"

    monkeypatch.setattr(curve_plot, "draw_run", draw)
    run_here(("plot", RUN, "curve.png"), tmp_path, {"CAIRN_STORE": bard.log.store.url})
    assert cairn.open().run(RUN).plot()._repr_png_() == (tmp_path / "curve.png").read_bytes() == b"a picture"
    of_the_command, ours = drawn
    assert ours == of_the_command


def test_a_sample_is_that_of_the_command(bard: WritingRun, tmp_path: Path) -> None:
    given = ("--prompt", "The ", "--tokens", "12", "--seed", "3")
    printed = run_here(("sample", RUN, *given), tmp_path, {"CAIRN_STORE": bard.log.store.url})
    assert cairn.open().run(RUN).sample("The ", tokens=12, seed=3) == printed.out.removesuffix("\n")


def test_a_set_is_compared_with_its_settings_losses_and_picture(store: LocalStore) -> None:
    for rate, loss in (("1e-3", 2.0), ("1e-2", 3.0)):
        run = fabricate(store, f"rates.lr={rate}", overrides=[f"training.lr={rate}"])
        run.start(overrides=[f"training.lr={rate}"])
        run.evaluate(run.commit(10), loss=loss)
    compared = cairn.Store(store).compare("rates")
    shown = compared._repr_html_()
    assert [row[0] for row in compared_runs_table(compared.view).rows] == ["rates.lr=1e-3", "rates.lr=1e-2"]
    assert "<th>training.lr</th>" in shown and "<td>0.001</td>" in shown and "data:image/png;base64," in shown


def test_a_store_without_runs_says_where_it_looked(store: LocalStore) -> None:
    assert cairn.Store(store)._repr_html_() == f"<p>no run in {store.url}</p>"


def test_text_of_others_is_no_tag_in_a_notebook(bard: WritingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = list[Any]()
    formatter = SimpleNamespace(for_type_by_name=lambda *given: registered.append(given))  # as IPython's
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    table = cairn.open().sql("select '<script>' as \"<b>\"")
    ((module, name, show),) = registered
    assert (module, name) == (type(table).__module__, type(table).__name__)
    assert show(table) == "<table><tr><th>&lt;b&gt;</th></tr><tr><td>&lt;script&gt;</td></tr></table>"


def refused_training(folder: Path) -> cairn.TrainingStopped:
    """Train the run with another seed than it has."""
    (folder / "bard.toml").write_text(CONFIGURATION)
    with fork_server().forking(), pytest.raises(cairn.TrainingStopped, match="seed") as caught:
        cairn.train("bard.toml", settings={"training.seed": 7})
    return caught.value


def test_in_a_notebook_the_command_speaks_in_the_cell(
    bard: WritingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    refused_training(tmp_path)
    said = capsys.readouterr()
    assert said.err == "" and said.out.startswith("\r") and "seed" in said.out


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
    stopped = refused_training(tmp_path)
    assert stopped.exit_code == 6
    assert str(stopped) in capsys.readouterr().err


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
