"""Applies the early-stop policy of one attempt (tasks.policy.early_stop).

With a policy, training is at most one evaluation ahead, and the last segment waits for all evaluations.
"""

from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from prefect.futures import PrefectFuture

from storage.checkpoints.checkpoint import quarantine_checkpoint
from storage.logs.log_entry import CheckpointReference, Writer
from storage.logs.run_entries import RunFinished
from storage.logs.run_log import RunLog
from storage.logs.run_state import CheckpointRecord
from tasks.attempt.shutdown_signal import ShutdownSignal
from tasks.evaluator.evaluation_run import EvaluationPlan
from tasks.policy.early_stop import Stop, StopTerms, find_stop, outstanding, stop_terms


class EarlyStopping:
    """Decides between segments whether the run stops early."""

    def __init__(self, log: RunLog, plan: EvaluationPlan, shutdown: ShutdownSignal, say: Callable[[str], None]) -> None:
        """Take the policy from the attempt's start entry."""
        self._log, self._plan, self._shutdown, self._say = log, plan, shutdown, say
        self._stop: Stop | None = None

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step is evaluated."""
        return self._terms(self._plan).is_due(step)

    def missing(self) -> Iterator[tuple[EvaluationPlan, CheckpointReference]]:
        """Yield the evaluations that are due and have no outcome, in step order."""
        state, plans = self._log.state, self._plan.all
        lost = [(record.committed, plan) for plan in plans for record in outstanding(state, self._terms(plan))]
        for committed, plan in sorted(lost, key=lambda item: (item[0].step, plans.index(item[1]))):
            yield plan, committed.reference

    def is_over(self, awaited: Sequence[PrefectFuture[Any]]) -> bool:
        """Wait for these evaluations or a shutdown, and return whether the run stops here.

        A finished run always stops: the process that finished it may have died before its attempt ended.
        """
        if self._log.state.finished is not None:
            return True
        if self._stop is None and self._terms(self._plan).policy.is_on:
            self._wait(awaited)
            self._stop = find_stop(self._log.refresh(), self._plan.suite.sha256)
            if self._stop is not None:
                self._say(f"  stops early at step {self._stop.step}: {self._stop.why} (early_stop.{self._stop.rule})")
        return self._stop is not None

    def finish(self, attempt: int, writer: Writer) -> bool:
        """Append run-finished at the step where the run stops early; returns False if it does not stop.

        Later checkpoints are quarantined, so that no attempt resumes from one and none is promoted.
        """
        stop = find_stop(self._log.refresh(), self._plan.suite.sha256)
        if stop is None:
            return False
        last = next(
            item.committed for item in self._log.state.surviving_checkpoints if item.committed.step == stop.step
        )
        why = f"trained beyond step {stop.step}, where the run stopped early: {stop.why}"
        for record in self._beyond(stop.step):
            quarantine_checkpoint(self._log, record.committed, why, writer=writer)
        body = RunFinished(
            attempt=attempt,
            step=last.step,
            manifest_sha256=last.manifest_sha256,
            state_sha256=last.state_sha256,
            stopped=stop.why,
            rule=stop.rule,
        )
        self._log.append(lambda state: body if state.finished is None else None, writer=writer)
        return True

    def _beyond(self, step: int) -> tuple[CheckpointRecord, ...]:
        return tuple(record for record in self._log.state.readable if record.committed.step > step)

    def _wait(self, evaluations: Sequence[PrefectFuture[Any]]) -> None:
        done: SimpleQueue[PrefectFuture[Any] | None] = SimpleQueue()
        for future in evaluations:
            future.add_done_callback(done.put)
        with self._shutdown.on_shutdown(lambda: done.put(None)):
            for _ in evaluations:
                if done.get() is None:
                    return

    def _terms(self, plan: EvaluationPlan) -> StopTerms:
        return stop_terms(self._log.state.attempts[-1].started.config, plan.suite.sha256)
