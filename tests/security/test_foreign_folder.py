"""No file of the working folder is imported, run or believed: by the command, its children, its servers, its workers.

Standard-library and third-party names beside a user's own script are Python's rule; there only Cairn's old names stand.
"""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from cairn.model.data.tokenizer import Tokenizer
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from tests.crash.prefect_api import JOB_TEMPLATE, prefect_command
from tests.crash.prefect_server import copy_untouched_database, shared_server
from tests.crash.training_command import Command, configuration
from tests.environment_allow_list import restrict
from tests.processes.waiting import patience_seconds, wait_for
from tests.security.foreign_folder import REFUSAL, ForeignFolder
from tests.text.shakespeare import TINY_SHAKESPEARE

pytestmark = [pytest.mark.linux, pytest.mark.xdist_group("foreign-folder")]
COMMAND = Path(sys.executable).parent / "cairn"
VERBS = (
    *(
        "watch --once",
        "runs",
        "status bard",
        "report bard",
        "attempts bard",
        "explain bard",
        "checkpoints bard",
        "evaluations bard",
    ),
    *("log bard", "diagnose bard", "compare bard bard", "simulate bard", "models", "config", "doctor"),
    *("evaluate bard --again", "evaluate bard --suite repetition", "replay bard", "verify bard"),
    *("sample bard --tokens 4", "export bard exported", "promote bard", "sweep bard", "fork bard@5 other"),
)
"""Beside these there are `train` and `ui`, which have tests of their own, and verbs of one of these kinds."""
OLD_NAMES = ("deployments", "flows", "model", "reports", "storage", "tasks")
SCRIPT = """
import cairn
run = cairn.open().run("bard")
print(cairn.open().runs["run_id"].to_pylist(), run.curve.num_rows)
try:
    cairn.train("bard.toml", run_id="refused", settings={"data.sources": ["nowhere.txt"]})
except cairn.TrainingStopped as stopped:
    print(stopped)
"""
DEPLOYMENT = """
name: foreign
pull: []
deployments: [{name: foreign, entrypoint: cairn.flows.train_gpt.train_gpt, work_pool: {name: foreign}}]
"""
CONFIGURATION = configuration(steps=10)


class Person:
    """A person in the foreign folder, who has set nothing but a store and a cache, and the installed command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, LocalStore(folder / "store")
        self.foreign = ForeignFolder(folder)
        own = {"CAIRN_STORE": self.store.url, "CAIRN_CACHE": str(folder / "cache"), "HOME": str(folder / "home")}
        self.environment = {**restrict(os.environ), **own}
        self.environment.pop("PYTHONPATH", None)

    def start(self, *words: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Start the command; its output goes to a file."""
        environment = {**self.environment, **variables}
        with (self.folder / "output.txt").open("wb") as output:
            return subprocess.Popen(
                [COMMAND, *words], cwd=self.folder, env=environment, stdout=output, stderr=output, process_group=0
            )

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def run(self, *words: str, **variables: str) -> None:
        """Run the command to its end: as it would elsewhere, and none of the stranger's files is opened."""
        assert self.start(*words, **variables).wait(timeout=patience_seconds()) == 0, self.output()
        assert self.foreign.traces() == set(), self.output()

    def ends(self, run_id: str) -> list[str]:
        """Return why the attempts of a run ended."""
        return [attempt.ended.reason for attempt in RunLog(self.store, run_id).refresh().attempts if attempt.ended]


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A person who has trained the run `bard`, shown by a server that was there."""
    person = Person(tmp_path_factory.mktemp("foreign"))
    (person.folder / "bard.toml").write_text(CONFIGURATION)
    person.run("train", "bard.toml", PREFECT_API_URL=shared_server())
    assert person.ends("bard") == ["completed"]
    yield person
    person.foreign.close()


def test_training_and_a_verb_open_none(person: Person) -> None:
    person.run("sql", "select count(*) from runs")


@pytest.mark.slow  # quick witness: the test above
@pytest.mark.parametrize("line", VERBS)
def test_no_verb_opens_one(person: Person, line: str) -> None:
    person.run(*line.split())


def test_a_plot_does_not_look_as_a_file_of_the_folder_says(person: Person) -> None:
    parts = ("axes.facecolor", "axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    (person.folder / "matplotlibrc").write_text("".join(f"{part}: 123456\n" for part in parts))
    person.run("plot", "bard", "curve.svg")
    assert b"#123456" not in (person.folder / "curve.svg").read_bytes()


def test_the_live_page_opens_none(person: Person) -> None:
    page = person.start("ui", "--port", "0")
    wait_for(lambda: "http://" in person.output(), page, "an address", person.output)
    address = next(word for word in person.output().split() if word.startswith("http://"))
    with urllib.request.urlopen(address, timeout=patience_seconds()) as answer:
        assert b"bard" in answer.read()
    page.send_signal(signal.SIGINT)
    assert page.wait(timeout=patience_seconds()) == 0 and person.foreign.traces() == set(), person.output()


def test_a_script_beside_files_of_cairns_old_names_reads_and_trains(person: Person, tmp_path: Path) -> None:
    for name in OLD_NAMES:
        (tmp_path / f"{name}.py").write_text(REFUSAL)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "bard.toml").write_text(CONFIGURATION)
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, cwd=tmp_path, env=person.environment, capture_output=True, text=True, check=False)
    read, refused = done.stdout.splitlines()
    assert read == "['bard'] 10" and "nowhere.txt" in refused, done.stderr


@pytest.mark.slow  # quick witness: the first test of this file
def test_a_run_with_a_server_of_its_own_is_killed_and_continued_and_opens_none(person: Person) -> None:
    copy_untouched_database(person.folder)
    process = person.start("train", "bard.toml", "--run-id", "killed", CAIRN_FAULTS="pause@7")
    wait_for(lambda: person.store.size("runs/killed/faults/pause-7.json") is not None, process, "step 7", person.output)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    person.run("train", "bard.toml", "--run-id", "killed")
    assert "a temporary Prefect server shows this run" in person.output()
    assert person.ends("killed") == ["lost", "completed"]


@pytest.mark.slow  # quick witness: the first test of this file
def test_the_children_that_parse_and_the_ranks_open_none(person: Person) -> None:
    text = Path(TINY_SHAKESPEARE).read_text()[:200_000]
    parquet.write_table(pa.table({"text": text.split("\n\n")}), person.folder / "plays.parquet")
    (person.folder / "tokenizer.json").write_text(Tokenizer.train_bpe([text[:9999]], 300).json)
    given = {"data.sources": '["plays.parquet"]', "data.tokenizer": "tokenizer.json", "training.processes": "2"}
    given |= {"evaluation.suite": "repetition"}
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    person.run("train", "bard.toml", "--run-id", "ranks", *words)
    assert person.ends("ranks") == ["completed"]


@pytest.mark.slow  # quick witness: tests/security/test_job_templates.py
def test_a_worker_in_the_folder_and_its_flow_run_open_none(tmp_path: Path) -> None:
    url = shared_server()
    command = Command(tmp_path, url)
    prefect = prefect_command(command, url)
    (tmp_path / "foreign.yaml").write_text(DEPLOYMENT)
    prefect("work-pool", "create", "foreign", "--type", "process", "--base-job-template", JOB_TEMPLATE)
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(tmp_path / "foreign.yaml"))
    prefect("deployment", "run", "train-gpt/foreign", "-p", f"config={tmp_path / 'run.toml'}", "-p", "run_id=bard")
    (tmp_path / "folder").mkdir()
    foreign = ForeignFolder(tmp_path / "folder")
    prefect("worker", "start", "--pool", "foreign", "--run-once", folder=foreign.folder)
    assert [attempt.ended and attempt.ended.reason for attempt in command.state().attempts] == ["completed"]
    assert foreign.traces() == set()
    foreign.close()
