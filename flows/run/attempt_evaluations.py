"""The evaluations of one attempt: one at a time beside training, at most one behind it if they may stop the run."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from queue import SimpleQueue

from cairn.flows.run.active_run import ActiveRun
from cairn.flows.run.steps import Steps
from cairn.storage.checkpoints.resume_point import quarantine_checkpoint
from cairn.storage.logs import log_entry, run_entries
from cairn.tasks.evaluate import Measurement
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan
from cairn.tasks.policy.early_stop import Stop, StopTerms, find_stop, outstanding


class AttemptEvaluations:
    """Starts the evaluations of an attempt, waits for those that a decision needs, and decides on an early stop."""

    def __init__(self, run: ActiveRun, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="evaluate")  # evaluators share it with training
        self._futures: list[Future[object]] = []
        self._earlier = 0  # how many were started before the newest commit
        self._stop: Stop | None = None
        self._is_attempt_over = False

    def start_missing(self, steps: Steps) -> None:
        """Start the evaluations that were due in earlier attempts and have no outcome."""
        for plan, reference in self.missing():
            committed = Future[log_entry.CheckpointReference]()
            committed.set_result(reference)
            self._start(plan, committed, steps)

    def missing(self) -> Iterator[tuple[EvaluationPlan, log_entry.CheckpointReference]]:
        """Yield the evaluations that are due and have no outcome, in step order."""
        state, plans = self._run.log.state, self._run.evaluation.all
        lost = [(record.committed, plan) for plan in plans for record in outstanding(state, self._terms(plan))]
        for committed, plan in sorted(lost, key=lambda item: (item[0].step, plans.index(item[1]))):
            yield plan, committed.reference

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step is evaluated."""
        return step == self._run.config.training.steps or self._terms(self._run.evaluation).is_due(step)

    def plans_at(self, step: int) -> tuple[EvaluationPlan, ...]:
        """Return the plans by which the checkpoint of this step is evaluated."""
        return self._run.evaluation.all if self.is_due(step) else ()

    def follow(self, committed: Future[log_entry.CheckpointReference], step: int, steps: Steps) -> None:
        """Evaluate the checkpoint of `step` once it is committed, if that is due."""
        self._earlier = len(self._futures)
        for plan in self.plans_at(step):
            self._start(plan, committed, steps)

    def stop_run(self, until: int | None = None) -> bool:
        """Wait and return whether the run stops early, before the segment that ends at `until`, or before any."""
        is_last = until is None or until == self._run.config.training.steps
        awaited = self._futures if is_last else self._futures[: self._earlier]  # those before the newest commit
        return self._run.retry.call(self.is_over, awaited)

    def is_over(self, awaited: Sequence[Future[object]]) -> bool:
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

    def end_attempt(self) -> None:
        """Give up evaluations from now on when a shutdown is requested: the receipt is written."""
        self._is_attempt_over = True

    def wait(self) -> None:
        """Wait for every evaluation; failures are in the log already."""
        self._beside.shutdown()

    def _start(self, plan: EvaluationPlan, committed: Future[log_entry.CheckpointReference], steps: Steps) -> None:
        def measure() -> None:
            asked = Measurement(reference=committed.result(), plan=plan, during_attempt=self._attempt)
            steps.evaluate(asked, self._run.log, leaves)

        def leaves() -> bool:
            return self._is_attempt_over and self._run.is_shutting_down()

        self._futures.append(self._beside.submit(copy_context().run, measure))

    def _wait_unless_shutdown(self, evaluations: Sequence[Future[object]]) -> None:
        done: SimpleQueue[object] = SimpleQueue()
        for future in evaluations:
            future.add_done_callback(done.put)
        with self._run.host.shutdown.on_shutdown(lambda: done.put(None)):
            for _ in evaluations:
                if done.get() is None:
                    return

    def _terms(self, plan: EvaluationPlan) -> StopTerms:
        return StopTerms(self._run.log.state.attempts[-1].started.config, plan.suite.sha256)


def finish_run(run: ActiveRun, attempt: int) -> None:
    """Append run-finished if the last step is committed or the run stops early; quarantine what an early stop voids."""
    log, writer, state = run.log, run.writer(attempt), run.log.refresh()
    stop, newest = find_stop(state, run.evaluation.suite.sha256), state.newest_committed
    if stop is not None:
        last = next(record.committed for record in state.surviving_checkpoints if record.committed.step == stop.step)
        why = f"trained beyond step {stop.step}, where the run stopped early: {stop.why}"
        for record in state.readable:
            if record.committed.step > stop.step:
                quarantine_checkpoint(log, record.committed, why, writer=writer)
    elif newest is not None and newest.committed.step >= run.config.training.steps:
        last = newest.committed
    else:
        return
    body = run_entries.RunFinished(
        attempt=attempt,
        step=last.step,
        manifest_sha256=last.manifest_sha256,
        state_sha256=last.state_sha256,
        stopped=stop.why if stop else "",
        rule=stop.rule if stop else "",
    )
    log.append(lambda state: body if state.finished is None else None, writer=writer)
