"""The task `evaluate`: metrics of one committed checkpoint, measured by a child process with failures of its own."""

from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.run_entries import CheckpointReference, EvaluationFailed, EvaluationRecorded
from storage.run_log import RunLog
from tasks.evaluation_run import EvaluationPlan, record_evaluation


@task(name="evaluate", task_run_name="evaluate {step}", cache_policy=NO_CACHE, persist_result=False)
def evaluate(
    log: RunLog,
    committed: Callable[[], CheckpointReference],
    plan: EvaluationPlan,
    *,
    step: int,
    during_attempt: int | None = None,
) -> EvaluationRecorded | EvaluationFailed:
    """Return the recorded evaluation, or the recorded failure of the evaluator; raises `CheckpointGone`.

    `committed` waits for the commit and raises what ended it. It is no future: of a future Prefect asks its API for the
    state, and an API that is away would cost the evaluation.
    """
    return record_evaluation(log, committed(), plan, during_attempt=during_attempt)
