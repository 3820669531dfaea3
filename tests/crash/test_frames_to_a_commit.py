"""From a command's arguments to the log entry of a commit it is a short way: few functions of ours in few files."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.crash.prefect_server import copy_untouched_database
from tests.crash.training_command import configuration
from tests.processes.waiting import patience_seconds

ROOT = Path(__file__).parents[2]
MOST_FRAMES, MOST_FILES = 12, 8
PROGRAM = """
import json, os, sys, threading, traceback
from pathlib import Path
from cairn.cli.command import main
from cairn.storage.stores.local_store import LocalStore

root, found, started = Path(sys.argv[1]), Path(sys.argv[2]), {}
begin, create = threading.Thread.start, LocalStore.create

def frames(stack):
    inside = ((Path(frame.filename), frame.name) for frame in stack)
    own = ((path.relative_to(root), name) for path, name in inside if path.is_relative_to(root))
    return [f"{path}:{name}" for path, name in own if path.parts[0] not in (".venv", "tests")]

def noting_start(thread):
    starter = threading.current_thread()
    started[thread] = started.get(starter, []) + frames(traceback.extract_stack())
    begin(thread)

def noting_create(store, key, data):
    if b'"kind": "checkpoint-committed"' in data and not found.exists():
        # This very function stands for the store's own, which it calls.
        own = [*started.get(threading.current_thread(), []), *frames(traceback.extract_stack())]
        found.write_text(json.dumps([*own, "storage/stores/local_store.py:create"]))
        os._exit(0)  # its children end with it
    return create(store, key, data)

threading.Thread.start, LocalStore.create = noting_start, noting_create
main(sys.argv[3:])
"""


def test_from_the_command_line_to_the_entry_of_a_commit_are_at_most_twelve_functions_in_eight_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.toml").write_text(configuration(steps=5, every_commits=1))
    copy_untouched_database(tmp_path)
    found = tmp_path / "frames.json"
    subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(ROOT), str(found), "train", "run.toml"],
        cwd=tmp_path,
        env={**os.environ, "CAIRN_CACHE": str(tmp_path / "cache"), "CAIRN_STORE": ""},
        timeout=patience_seconds(),
        check=True,
    )
    frames = json.loads(found.read_text())
    assert frames[0] == "cairn/cli/command.py:main" and "flows/train_gpt.py:train" in frames
    assert len(frames) <= MOST_FRAMES, frames
    assert len({frame.partition(":")[0] for frame in frames}) <= MOST_FILES, frames
