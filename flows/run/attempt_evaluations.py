"""The evaluations of one attempt: one at a time beside training, at most one behind it if they may stop the run."""

from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from prefect.futures import PrefectFuture

from cairn.flows.run.active_run import ActiveRun
from cairn.storage.checkpoints.resume_point import quarantine_checkpoint
from cairn.storage.logs import log_entry, run_entries
from cairn.storage.stores.document import project
from cairn.tasks.evaluate import evaluate, task_name
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan
from cairn.tasks.policy.early_stop import Stop, StopTerms, find_stop, outstanding


class AttemptEvaluations:
    """Submits the evaluations of an attempt, waits for those that a decision needs, and decides on an early stop."""

    def __init__(self, run: ActiveRun, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._futures: list[PrefectFuture[Any]] = []
        self._earlier = 0  # how many were submitted before the newest commit
        self._stop: Stop | None = None
        self._is_attempt_over = False

    def submit_missing(self) -> None:
        """Submit the evaluations that were due in earlier attempts and have no outcome."""
        for plan, reference in self.missing():

            def committed(reference: log_entry.CheckpointReference = reference) -> log_entry.CheckpointReference:
                return reference

            self._submit(plan, committed, reference.step)

    def missing(self) -> Iterator[tuple[EvaluationPlan, log_entry.CheckpointReference]]:
        """Yield the evaluations that are due and have no outcome, in step order."""
        state, plans = self._run.log.state, self._run.evaluation.all
        lost = [(record.committed, plan) for plan in plans for record in outstanding(state, self._terms(plan))]
        for committed, plan in sorted(lost, key=lambda item: (item[0].step, plans.index(item[1]))):
            yield plan, committed.reference

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step is evaluated."""
        return step == self._run.config.training.steps or self._terms(self._run.evaluation).is_due(step)

    def follow_commit(self, step: int, committed: Callable[[], log_entry.CheckpointReference]) -> None:
        """Evaluate the checkpoint of `step` if that is due; `committed` waits for its commit."""
        self._earlier = len(self._futures)
        if self.is_due(step):
            for plan in self._run.evaluation.all:
                self._submit(plan, committed, step)

    def stop_run(self, until: int | None = None) -> bool:
        """Wait and return whether the run stops early, before the segment that ends at `until`, or before any."""
        is_last = until is None or until == self._run.config.training.steps
        awaited = self._futures if is_last else self._futures[: self._earlier]  # those before the newest commit
        return self._run.retry.call(lambda: self.is_over(awaited))

    def is_over(self, awaited: Sequence[PrefectFuture[Any]]) -> bool:
        """Wait for these evaluations or a shutdown; return whether the run stops here, as a finished one does."""
        run, plan = self._run, self._run.evaluation
        if run.log.state.finished is not None:
            return True
        if self._stop is None and self._terms(plan).config.early_stop.is_on:
            self._wait_unless_shutdown(awaited)
            self._stop = find_stop(run.log.refresh(), plan.suite.sha256)
            if self._stop is not None:
                run.say(f"  stops early at step {self._stop.step}: {self._stop.why} (early_stop.{self._stop.rule})")
        return self._stop is not None

    def finish_early(self, writer: log_entry.Writer) -> bool:
        """Append run-finished where the run stops early, and quarantine what is later; returns False if it does not."""
        log = self._run.log
        state = log.refresh()
        stop = find_stop(state, self._run.evaluation.suite.sha256)
        if stop is None:
            return False
        last = next(record.committed for record in state.surviving_checkpoints if record.committed.step == stop.step)
        why = f"trained beyond step {stop.step}, where the run stopped early: {stop.why}"
        for record in state.readable:
            if record.committed.step > stop.step:
                quarantine_checkpoint(log, record.committed, why, writer=writer)
        body = project(last, run_entries.RunFinished, attempt=self._attempt, stopped=stop.why, rule=stop.rule)
        log.append(lambda state: body if state.finished is None else None, writer=writer)
        return True

    def end_attempt(self) -> None:
        """Give up evaluations from now on when a shutdown is requested: the receipt is written."""
        self._is_attempt_over = True

    def wait(self) -> None:
        """Wait for every evaluation; failures are in the log already."""
        for future in self._futures:
            future.wait()

    def _submit(self, plan: EvaluationPlan, committed: Callable[[], log_entry.CheckpointReference], step: int) -> None:
        named = evaluate.with_options(task_run_name=task_name(step, plan))
        self._futures.append(
            # Prefect's stubs know `wait_for` only where they know no other parameter.
            named.submit(  # type: ignore[call-overload]
                self._run.log,
                committed,
                plan,
                step=step,
                during_attempt=self._attempt,
                stopping=lambda: self._is_attempt_over and self._run.is_shutting_down(),
                wait_for=self._futures[-1:],  # one evaluator at a time: they share the machine with training
            )
        )

    def _wait_unless_shutdown(self, evaluations: Sequence[PrefectFuture[Any]]) -> None:
        done: SimpleQueue[PrefectFuture[Any] | None] = SimpleQueue()
        for future in evaluations:
            future.add_done_callback(done.put)
        with self._run.shutdown.on_shutdown(lambda: done.put(None)):
            for _ in evaluations:
                if done.get() is None:
                    return

    def _terms(self, plan: EvaluationPlan) -> StopTerms:
        return StopTerms(self._run.log.state.attempts[-1].started.config, plan.suite.sha256)
