"""The step `evaluate`: measures one committed checkpoint in a child process that can fail on its own."""

from collections.abc import Callable
from dataclasses import dataclass

from prefect import task

from cairn.storage.logs import run_entries, run_log
from cairn.tasks.errors import EvaluationInterrupted
from cairn.tasks.evaluator.evaluation_run import Measurement, record_evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """A shutdown request stopped the evaluator; nothing failed and nothing is recorded."""

    why: str


Evaluated = run_entries.EvaluationRecorded | run_entries.EvaluationFailed | Interrupted


@task(name="evaluate", task_run_name="evaluate {measurement}", persist_result=False)
def evaluate(measurement: Measurement, log: run_log.RunLog, stopping: Callable[[], bool] = lambda: False) -> Evaluated:
    """Record the evaluation or the evaluator's failure, as `record_evaluation` does."""
    try:
        return record_evaluation(log, measurement, stopping=stopping)
    except EvaluationInterrupted as interrupted:
        return Interrupted(why=str(interrupted))
