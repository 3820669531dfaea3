"""Two ranks of a run, watched from before their first import: neither reads a pickle, not even inside a library."""

import os
from pathlib import Path

import pytest

from tests.crash.prefect_server import shared_server
from tests.crash.training_command import Command

pytestmark = [pytest.mark.linux, pytest.mark.slow]  # quick witness: tests/house/test_no_pickle.py
ROOT = Path(__file__).parents[2]
WATCH = """
import os, pickle, traceback

def note(what):
    with open({notes!r}, "a") as notes:
        notes.write(what + "\\n")

def watched(read):
    def noting(*arguments, **keywords):
        note("pickle: " + " < ".join(frame.filename for frame in reversed(traceback.extract_stack()[:-1])))
        return read(*arguments, **keywords)
    return noting

class Unpickler(pickle.Unpickler):
    load = watched(pickle.Unpickler.load)

if "CAIRN_RANK_STORE" in os.environ and "RANK" in os.environ:
    note("rank " + os.environ["RANK"])
    pickle.load, pickle.loads, pickle.Unpickler = watched(pickle.load), watched(pickle.loads), Unpickler
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_commit_and_end_without_reading_a_pickle(tmp_path: Path, parallel: str) -> None:
    notes = tmp_path / "notes"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(notes=str(notes)))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = Command(tmp_path, shared_server(), environment={"PYTHONPATH": path}, forked=False)
    keys = ("training.steps=10", "training.processes=2", f"training.parallel={parallel}")
    command.train(*(word for key in keys for word in ("--set", key)))
    assert sorted(notes.read_text().splitlines()) == ["rank 0", "rank 1"]
