"""docs/tutorial.md, walked from its first command to its last by the real programs, on the text that tests train on.

The quicker witness is `tests/house/test_documented_commands.py`, which parses the same lines.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.local_store import LocalStore
from tests.commands import ROOT, run_process
from tests.documented_commands import DocumentedCommand, documented_commands, documented_configurations
from tests.text.shakespeare import TINY_SHAKESPEARE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tutorial")]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """The folder after the tutorial, and how each of its commands ended."""

    folder: Path
    ended: tuple[tuple[DocumentedCommand, int, str], ...]

    @property
    def store(self) -> LocalStore:
        """The store that the commands made."""
        return LocalStore(self.folder / "cairn-store")

    def state(self, run: str) -> RunState:
        """A run's state as a stranger reads it."""
        return RunLog(self.store, run).refresh()


@pytest.fixture(scope="module")
def walk(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """The tutorial, done once; it goes on behind a command that ends otherwise than it says."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "texts").mkdir()
    shutil.copy(TINY_SHAKESPEARE, folder / "texts")
    (configuration,) = documented_configurations(TUTORIAL)
    (folder / "my.toml").write_text(configuration, encoding="utf-8")
    lines = [command for command in documented_commands(TUTORIAL) if not command.is_in_sentence]
    return Walk(folder=folder, ended=tuple((line, *run(line, folder, api_url)) for line in lines))


def run(command: DocumentedCommand, folder: Path, api_url: str) -> tuple[int, str]:
    environment = {"PREFECT_API_URL": api_url, "PREFECT_HOME": str(folder / "prefect"), "CAIRN_STORE": ""}
    ended = run_process(tuple(command.words[1:]), folder, {**environment, **command.variables})
    return ended.code, ended.out + ended.err


def test_every_command_of_the_tutorial_leaves_as_it_says(walk: Walk) -> None:
    assert [(line.text, code, out) for line, code, out in walk.ended if code != line.exit_code] == []


def test_the_tutorials_run_is_killed_preempted_and_completed(walk: Walk) -> None:
    reasons = [attempt.ended.reason for attempt in walk.state("my").attempts if attempt.ended]
    assert reasons == ["lost", "preempted", "completed"]


def test_the_tutorials_disturbed_run_has_the_bits_of_the_undisturbed_one(walk: Walk) -> None:
    finished, undisturbed = walk.state("my").finished, walk.state("undisturbed").finished
    assert finished is not None and undisturbed is not None
    assert finished.state_sha256 == undisturbed.state_sha256


def test_the_tutorials_disturbed_run_has_the_bits_of_the_one_file(walk: Walk) -> None:
    assert "    python docs/one_file.py texts/*.txt\n" in TUTORIAL
    texts = sorted(map(str, walk.folder.glob("texts/*.txt")))
    command = [sys.executable, ROOT / "docs" / "one_file.py", *texts]
    done = subprocess.run(command, cwd=walk.folder, capture_output=True, text=True, check=True)
    finished = walk.state("my").finished
    assert finished is not None and f"state_sha256 {finished.state_sha256}" in done.stdout


def test_the_run_that_the_tutorial_deletes_keeps_its_log_and_no_checkpoint(walk: Walk) -> None:
    state = walk.state("undisturbed")
    assert state.deleted is not None and state.deleted.why == "only to compare with"
    assert walk.store.keys("runs/undisturbed/checkpoints") == [] and walk.state("my").deleted is None


def test_the_tutorials_alias_goes_forward_back_and_forward_again(walk: Walk) -> None:
    history = [decision for _, decision in Registry(walk.store, "champion").refresh().history]
    runs = [getattr(decision, "run_id", "back") for decision in history]
    assert runs == ["my", "undisturbed", "longer", "back", "longer"]
