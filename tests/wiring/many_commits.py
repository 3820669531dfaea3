"""Trains a run of many commits, each evaluated, without tensors; prints what its process holds at each evaluation.

`python -m tests.wiring.many_commits FOLDER COMMITS`: a JSON line an evaluation, with memory, descriptors and threads.
"""

import json
import random
import string
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from cairn.tasks.evaluator.evaluator_process import Outcome
from tests.wiring.flow_in_process import Evaluators, FlowWorld, answer_for_evaluators

SAMPLES = 3
"""As many as the default suite has prompts."""


class MeasuringEvaluators(Evaluators):
    """Each prints what this process holds; nothing that they are given is kept."""

    count = 0

    def run(self, spec: bytes, timeout_seconds: float, **rest: Any) -> Outcome:
        """Print what is held, and answer."""
        ours = psutil.Process()
        self.count += 1
        held = {
            "number": self.count,
            "bytes": anonymous_bytes(),
            "files": ours.num_fds(),
            "threads": ours.num_threads(),
        }
        print(json.dumps(held), flush=True)
        words = random.Random(self.count)
        texts = ["".join(words.choices(string.ascii_lowercase + "  ", k=400)) for _ in range(SAMPLES)]
        return Outcome(result=json.dumps({"metrics": {"val_loss": 2.0}, "samples": texts}).encode(), problem="")


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs: pages of libraries come and go with other processes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def main() -> None:
    """Train the run to its end."""
    folder, commits = Path(sys.argv[1]), int(sys.argv[2])
    with pytest.MonkeyPatch.context() as patch:
        world = FlowWorld(folder)
        world.evaluators = MeasuringEvaluators()
        answer_for_evaluators(patch, world)
        world.train(f"training.steps={commits}", "checkpoint.every_steps=1", "checkpoint.keep_last=2")


if __name__ == "__main__":
    main()
