"""The task `evaluate`: metrics of one committed checkpoint, measured by a child process with failures of its own."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.run_entries import CheckpointReference, EvaluationFailed, EvaluationRecorded
from storage.run_log import RunLog
from tasks.evaluation_run import EvaluationPlan, record_evaluation


@task(name="evaluate", task_run_name="evaluate {step}", cache_policy=NO_CACHE, persist_result=False)
def evaluate(
    log: RunLog, reference: CheckpointReference, plan: EvaluationPlan, *, step: int, during_attempt: int | None = None
) -> EvaluationRecorded | EvaluationFailed:
    """Return the recorded evaluation, or the recorded failure of the evaluator; raises `CheckpointGone`."""
    return record_evaluation(log, reference, plan, during_attempt=during_attempt)
