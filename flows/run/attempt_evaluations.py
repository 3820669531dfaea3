"""The evaluations of one attempt: one at a time beside training, and what they say about stopping early."""

from collections.abc import Callable
from functools import partial
from typing import Any

from prefect.futures import PrefectFuture

from flows.run.active_run import ActiveRun
from flows.run.early_stopping import EarlyStopping
from storage.logs.log_entry import CheckpointReference, Writer
from tasks.evaluate import evaluate, task_name
from tasks.evaluator.evaluation_run import EvaluationPlan


class AttemptEvaluations:
    """Submits the evaluations of an attempt and waits for those that a decision needs."""

    def __init__(self, run: ActiveRun, attempt: int) -> None:
        """Submit nothing yet."""
        self._run, self._attempt = run, attempt
        self._early_stopping = EarlyStopping(run.log, run.evaluation, run.shutdown, run.say)
        self._futures: list[PrefectFuture[Any]] = []
        self._earlier = 0  # how many were submitted before the newest commit
        self._is_attempt_over = False

    def submit_missing(self) -> None:
        """Submit the evaluations that were due in earlier attempts and have no outcome."""
        for plan, reference in self._early_stopping.missing():
            self._submit(plan, partial(_same, reference), reference.step)

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step is evaluated."""
        return step == self._run.config.training.steps or self._early_stopping.is_due(step)

    def follow_commit(self, step: int, committed: Callable[[], CheckpointReference]) -> None:
        """Evaluate the checkpoint of `step` if that is due; `committed` waits for its commit."""
        self._earlier = len(self._futures)
        if self.is_due(step):
            for plan in self._run.evaluation.all:
                self._submit(plan, committed, step)

    def stop_run(self, until: int | None = None) -> bool:
        """Return whether the run stops early, before the segment that ends at `until`, or before any.

        Waits for every evaluation before the last segment, otherwise for those before the newest commit.
        """
        is_last = until is None or until == self._run.config.training.steps
        awaited = self._futures if is_last else self._futures[: self._earlier]
        return self._run.retry.call(lambda: self._early_stopping.is_over(awaited))

    def finish_early(self, writer: Writer) -> bool:
        """Finish the run at its early stop; False where it does not stop early."""
        return self._early_stopping.finish(self._attempt, writer)

    def end_attempt(self) -> None:
        """Give up evaluations from now on when a shutdown is requested: the receipt is written."""
        self._is_attempt_over = True

    def wait(self) -> None:
        """Wait for every evaluation; failures are in the log already."""
        for future in self._futures:
            future.wait()

    def _submit(self, plan: EvaluationPlan, committed: Callable[[], CheckpointReference], step: int) -> None:
        named = evaluate.with_options(task_run_name=task_name(step, plan))
        self._futures.append(
            # Prefect's stubs know `wait_for` only where they know no other parameter.
            named.submit(  # type: ignore[call-overload]
                self._run.log,
                committed,
                plan,
                step=step,
                during_attempt=self._attempt,
                stopping=self._must_stop,
                wait_for=self._futures[-1:],  # one evaluator at a time: they share the machine with training
            )
        )

    def _must_stop(self) -> bool:
        return self._is_attempt_over and self._run.is_shutting_down()


def _same(reference: CheckpointReference) -> CheckpointReference:
    return reference
