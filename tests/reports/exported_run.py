"""A run whose attempts write step records, commit, and die: what exporters follow."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cairn.reports.exporters.curve_follower import CurveFollower
from cairn.reports.exporters.exporters import Exporter
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import StepRecord, StepTail, read_step_records, splice, step_log_key
from cairn.storage.stores.object_store import ObjectStore
from tests.fabricated_run import FabricatedRun, fabricate


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedRun:
    """Each attempt's losses tell which attempt it was: step 7 of attempt 2 has loss 7.2."""

    run: FabricatedRun

    @property
    def state(self) -> RunState:
        return self.run.log.refresh()

    def start(self) -> None:
        """Start the next attempt; it resumes from the newest commit."""
        self.run.start()

    def train(self, first: int, last: int) -> None:
        """Write the open attempt's records of these steps, both included."""
        attempt = self.run.log.state.latest_attempt
        key, store = step_log_key(self.run.log.prefix, attempt), self.run.log.store
        before = store.read(key) if store.size(key) else b""
        lines = (step_line(step, attempt) for step in range(first, last + 1))
        store.write(key, before + b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def die(self) -> None:
        """End the open attempt."""
        self.run.end("preempted", action="resume")

    def curve(self) -> list[tuple[int, float]]:
        """The surviving line as it is spliced at once."""
        lines = read_step_records(self.run.log.store, self.run.log.prefix, self.state.attempts)
        return [(point.record.step, point.record.train_loss) for point in splice(lines, self.state.attempts)]


def step_line(step: int, attempt: int) -> StepRecord:
    return StepRecord(
        step=step,
        attempt=attempt,
        train_loss=step + attempt / 10,
        lr=0.1,
        grad_norm=1.0,
        tokens_per_second=100.0,
        mfu=0.1,
        memory_bytes=1,
        seconds=0.5,
        probe_loss=2.0 if step % 10 == 0 else None,
        sample=None,
    )


def interrupted_run(store: ObjectStore, run_id: str = "bard") -> ExportedRun:
    """Two attempts: the first commits 10, trains to 14 and dies; the second goes on from 10 to 20."""
    run = ExportedRun(run=fabricate(store, run_id))
    run.start()
    run.train(1, 10)
    run.run.evaluate(run.run.commit(10), loss=3.0)
    run.train(11, 14)
    run.die()
    run.start()
    run.train(11, 20)
    run.run.evaluate(run.run.commit(20), loss=2.0)
    return run


def following(run: ExportedRun, exporter: Exporter) -> Callable[[], None]:
    """Begin a exporter as a process that trains the run would; each call tells it what is new."""
    exporter.begin(run.state)
    follower = CurveFollower(StepTail(run.run.log.store, run.run.log.prefix))

    def follow() -> None:
        more = True
        while more:
            update = follower.follow(run.state)
            exporter.write(update)
            more = update.more

    return follow
