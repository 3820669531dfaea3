"""From a command's arguments to the log entry of a commit it is a short way: few functions of ours in few files."""

import json

from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds

MOST_FRAMES, MOST_FILES = 12, 8


def test_from_the_command_line_to_the_entry_of_a_commit_are_at_most_twelve_functions_in_eight_files(
    command: Command,
) -> None:
    found = command.folder / "frames.json"
    words = (str(found), "train", "run.toml", "--set", "training.steps=5")
    process = command.start_verb(*words, program="tests.crash.framed_command")
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    frames = json.loads(found.read_text())
    assert frames[0] == "cairn/cli/command.py:main" and "flows/train_gpt.py:train" in frames
    assert len(frames) <= MOST_FRAMES, frames
    assert len({frame.partition(":")[0] for frame in frames}) <= MOST_FILES, frames
