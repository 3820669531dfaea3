"""Draws text from each checkpoint of a training run as it is committed; none is pinned, so one may be passed over."""

import os
import time
from collections.abc import Callable

from cairn.operations.text_sampling import RunSampler, SampleRequest, checkpoint_heading, show_text, write_samples
from model.errors import InvalidInput, ModelError
from reports.queries.run_lookup import find_run
from storage.errors import IntegrityError, ObjectMissing, StoreRefused, StoreUnavailable
from storage.logs.log_entry import CheckpointReference
from storage.logs.run_log import RunLog
from storage.logs.run_state import CheckpointRecord, RunState
from storage.stores.object_store import ObjectStore
from tasks.errors import InvalidConfiguration
from tasks.text.output import say


class CheckpointFollower:
    """Uses the newest committed checkpoint of a run, then each later one, until the run has finished."""

    def __init__(
        self,
        log: RunLog,
        use: Callable[[CheckpointReference], None],
        *,
        every_seconds: float,
        say: Callable[[str], None],
        sleep: Callable[[float], None],
    ) -> None:
        """Read nothing yet; `use` is called once for a checkpoint, and again if the store was away."""
        self._log, self._use = log, use
        self._every_seconds, self._say, self._sleep = every_seconds, say, sleep
        self._passed: int | None = None  # how many of the run's checkpoints are behind us
        self._last_said = ""

    def follow(self) -> None:
        """Return when the run has finished and its last checkpoint was used; raises `StoreRefused`."""
        while True:
            try:
                state = self._log.refresh()
                if self._passed is None and state.newest_committed is not None:
                    self._passed = state.checkpoints.index(state.newest_committed)
                if self._passed is not None and self._passed < len(state.checkpoints):
                    self._use_or_skip(state.checkpoints[self._passed])
                    self._passed += 1
                    continue
                if state.finished is not None:
                    return
                self._say_once(_describe_wait(state))
            except StoreRefused:
                raise
            except StoreUnavailable as error:
                self._say_once(f"the store is away, asking again every {self._every_seconds:g} s: {error}")
            self._sleep(self._every_seconds)

    def _use_or_skip(self, record: CheckpointRecord) -> None:
        reference, problem = record.committed.reference, ""
        try:
            if record.is_committed:
                self._use(reference)
            else:
                problem = f"it is {record.state} by now"
        except InvalidInput:
            raise
        except ModelError as error:
            problem = f"{error}"
        except (IntegrityError, ObjectMissing) as error:
            now = self._log.refresh().find(reference.prefix)
            problem = f"it is {now.state} by now" if now is not None and not now.is_committed else f"{error}"
        if problem:
            self._say(f"{checkpoint_heading(reference)} is passed over: {problem}")
        self._last_said = ""

    def _say_once(self, line: str) -> None:
        if line and line != self._last_said:
            self._say(line)
        self._last_said = line


def follow_run(store: ObjectStore, run: str, request: SampleRequest, *, every_seconds: float, json: bool) -> None:
    """Print text of each checkpoint until the run has finished, at low priority; RUN@STEP is `InvalidConfiguration`."""
    if json:
        raise InvalidConfiguration(
            "--follow --json: one document cannot hold texts that are still to come; leave one out"
        )
    if not 0 < every_seconds < float("inf"):
        raise InvalidConfiguration(f"--every {every_seconds}: must be more than 0 seconds")
    run_id, _, step = run.partition("@")
    if step:
        raise InvalidConfiguration(f"--follow {run}: follows a whole run; leave @{step} out")
    log = find_run(store, run_id)
    sampler = RunSampler(log, request)

    def use(reference: CheckpointReference) -> None:
        sampler.load(reference)
        show_text(f"{checkpoint_heading(reference)}\n")
        write_samples(sampler, request, show=show_text)
        show_text("\n")

    os.nice(15)  # training on the same machine has priority, as it has over evaluators
    CheckpointFollower(log, use, every_seconds=every_seconds, say=say, sleep=time.sleep).follow()


def _describe_wait(state: RunState) -> str:
    if state.attempts and (ended := state.attempts[-1].ended) is not None:
        return f"attempt {ended.attempt} ended: {ended.reason}; waiting for the run to go on"
    return "" if state.checkpoints else "no checkpoint is committed yet; waiting for the first"
