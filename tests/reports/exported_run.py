"""A run whose attempts write step records, commit, and die: what exporters follow."""

from collections.abc import Callable
from dataclasses import dataclass

from cairn.reports.exporters.curve_follower import CurveFollower
from cairn.reports.exporters.exporters import Exporter
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import StepTail, read_step_records, splice
from cairn.storage.stores.object_store import ObjectStore
from tests.fabricated_run import FabricatedRun, fabricate, write_steps


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
        probes = {"probe_loss": lambda step: None if step % 10 else 2.0}
        losses = {"train_loss": lambda step: step + attempt / 10}
        write_steps(self.run.log, attempt, range(first, last + 1), **losses, **probes)

    def die(self) -> None:
        """End the open attempt."""
        self.run.end("preempted", action="resume")

    def curve(self) -> list[tuple[int, float]]:
        """The surviving line as it is spliced at once."""
        lines = read_step_records(self.run.log.store, self.run.log.prefix, self.state.attempts)
        return [(point.record.step, point.record.train_loss) for point in splice(lines, self.state.attempts)]


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
