"""Follows a run of a million steps as the command does beside training; prints what that took at each commit.

`python -m tests.tasks.policy.million_steps STEPS COMMITS`: a JSON line a commit, with peak memory and what was read.
Lines are made when they are read, so that neither a disk nor this process holds them.
"""

import json
import resource
import sys

import msgspec

from cairn.reports.exporters.curve_follower import CurveFollower
from cairn.storage.errors import ObjectMissing
from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.run_state import AttemptRecord, RunState
from cairn.storage.logs.step_log import StepSample, StepTail, step_log_key
from cairn.tasks.evaluator.curve_reader import CurveReader
from cairn.tasks.policy.curve_verdict import judge
from tests.entries import NOON, started
from tests.memory_store import MemoryStore
from tests.tasks.long_run import step_record

LINE_BYTES = 400
_KIBIBYTE = 1024 if sys.platform == "linux" else 1


class GrowingRun(MemoryStore):
    """The step log of one attempt, as long as it has trained."""

    def __init__(self) -> None:
        super().__init__("million")
        self.trained, self.read_bytes = 0, 0

    def size(self, key: str) -> int | None:
        return self.trained * LINE_BYTES if key == step_log_key("runs/r", 1) else None

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        if key != step_log_key("runs/r", 1):
            raise ObjectMissing(key)
        first, last = start // LINE_BYTES + 1, (start + len(into)) // LINE_BYTES + 1
        lines = b"".join(line(step) for step in range(first, min(last, self.trained) + 1))
        found = lines[start % LINE_BYTES :][: len(into)]
        into[: len(found)] = found
        self.read_bytes += len(found)
        return len(found)


def line(step: int) -> bytes:
    """Return the record of a step in a line of `LINE_BYTES`."""
    return msgspec.json.encode(step_record(step, loss=2.0 + 3.0 / (1 + step / 1000))).ljust(LINE_BYTES - 1) + b"\n"


def main() -> None:
    """Follow the run: a verdict, the page's sample and an exporter at each commit."""
    steps, commits = map(int, sys.argv[1:])
    run, state = GrowingRun(), RunState(attempts=History([AttemptRecord(started=started(1), started_at=NOON)]))
    reader, sample, follower = (
        CurveReader(run, "runs/r"),
        StepSample(run, "runs/r"),
        CurveFollower(StepTail(run, "runs/r")),
    )
    for commit in range(1, commits + 1):
        run.trained, run.read_bytes = steps * commit // commits, 0
        verdict = judge(reader.read(state, suite_sha256=None, until_step=run.trained))
        sample.read(state.attempts)
        while follower.follow(state).more:
            follower._unsettled.clear()  # they are committed
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBIBYTE
        print(json.dumps({"steps": verdict.numbers["steps"], "peak": peak, "read": run.read_bytes}), flush=True)


if __name__ == "__main__":
    main()
