"""What a stranger sees of a run while it is disturbed: its log, its steps, its staged folders.

Owns the reading and the memory of it: what was once seen in the log must be there at the end. Reads past every fault.
"""

from pathlib import Path

from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import CheckpointState, RunState
from cairn.storage.logs.step_log import read_heartbeat
from cairn.storage.stores.object_store import ObjectStore
from tests.programs.chaos.kinds import Moment
from tests.programs.chaos.plan import EARLY_SECONDS, Fault
from tests.programs.chaos.processes import Processes, Role

RUN = "bard"


class Observer:
    """Looks at one run, again and again."""

    def __init__(self, store: ObjectStore, processes: Processes) -> None:
        self.store, self.processes = store, processes
        self._log = RunLog(store, RUN)
        self.seen: dict[int, str] = {}

    def state(self) -> RunState:
        """Return the run's state now, and remember the newest entry."""
        state = self._log.refresh()
        if self._log.head is not None:
            self.seen[self._log.seq] = self._log.head.entry.write_id
        return state

    def newest_seq(self) -> int:
        """Return the number of the newest entry."""
        self.state()
        return self._log.seq

    def trained_step(self, state: RunState) -> int:
        """Return how far the newest attempt is; a store elsewhere is told by heartbeats."""
        attempt = state.latest_attempt
        folder = self.store.local_path(f"runs/{RUN}/steps")
        if folder is None:
            beat = read_heartbeat(self.store, f"runs/{RUN}", attempt)
            return beat.step if beat else 0
        return max(map(_last_step, folder.glob(f"attempt-{attempt:04d}*.jsonl")), default=0)

    def has_trained(self, step: int) -> bool:
        """Whether an attempt is at work and has got that far."""
        state = self.state()
        return state.open_attempt is not None and self.trained_step(state) >= step

    def has_committed(self, step: int) -> bool:
        """Whether an attempt is at work and a checkpoint of that step or a later one is committed."""
        state = self.state()
        newest = state.newest_committed
        return state.open_attempt is not None and newest is not None and newest.committed.step >= step

    def staged(self, state: RunState) -> list[str]:
        """Return the folders of checkpoints that the newest attempt has not committed yet."""
        ending = f"-attempt-{state.latest_attempt:04d}"
        folders = self.store.folders(f"runs/{RUN}/checkpoints")
        return [folder for folder in folders if folder.endswith(ending) and state.find(folder) is None]

    def is_reached(self, fault: Fault, after_attempt: int) -> bool:
        """Whether the fault's moment is now; a resume is one of an attempt after `after_attempt`."""
        if fault.moment is Moment.EARLY:
            return self._is_early(fault)
        state = self.state()
        match fault.moment:
            case Moment.START:
                return not state.latest_attempt and self._is_there(Role.FLOW)
            case Moment.PROMOTION:
                return state.finished is not None and self._is_there(Role.FLOW)
            case Moment.RESUME:
                is_new = state.open_attempt is not None and state.latest_attempt > after_attempt
                return is_new and self._is_there(Role.TRAINER)
        if state.open_attempt is None or self.trained_step(state) < fault.step:
            return False
        match fault.moment:
            case Moment.STEP:
                return self._is_there(Role.TRAINER)
            case Moment.COMMIT:
                return bool(self.staged(state)) and self._is_there(Role.FLOW)
            case Moment.SWEEP:
                return any(
                    record.state == CheckpointState.SUPERSEDED for record in state.checkpoints
                ) and self._is_there(Role.FLOW)
        return False  # evaluators are waited for with the trainer halted

    def _is_early(self, fault: Fault) -> bool:
        """Whether a command has the fault's age."""
        commands = self.processes.of(Role.FLOW)
        return any(fault.age_seconds <= one.age_seconds <= EARLY_SECONDS for one in commands)

    def _is_there(self, role: Role) -> bool:
        return bool(self.processes.of(role))


def _last_step(path: Path) -> int:
    """Return the step of the last whole line; 0 where there is none."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return 0
    return int(lines[-1].split(b'"step":', 1)[1].split(b",")[0].rstrip(b"}")) if lines else 0
