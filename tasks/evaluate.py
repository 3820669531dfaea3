"""The task `evaluate`: metrics of one committed checkpoint, measured by a child process with failures of its own."""

from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.logs.log_entry import CheckpointReference
from storage.logs.run_entries import EvaluationFailed, EvaluationRecorded
from storage.logs.run_log import RunLog
from tasks.evaluator.evaluation_run import EvaluationPlan, record_evaluation
from tasks.evaluator.evaluation_suite import CommandSuite
from tasks.evaluator.evaluator_process import never


@task(name="evaluate", task_run_name="evaluate {step}", cache_policy=NO_CACHE, persist_result=False)
def evaluate(
    log: RunLog,
    committed: Callable[[], CheckpointReference],
    plan: EvaluationPlan,
    *,
    step: int,
    during_attempt: int | None = None,
    again: bool = False,
    asked: bool = False,
    stopping: Callable[[], bool] = never,
) -> EvaluationRecorded | EvaluationFailed:
    """Return the recorded evaluation, or the recorded failure of the evaluator; raises `CheckpointGone`.

    A spent budget is final unless somebody `asked`. Once `stopping` says so the evaluator is ended and
    `EvaluationInterrupted` is raised, with nothing on record.

    `committed` waits for the commit and raises what ended it. It is no future: of a future Prefect asks its API for the
    state, and an API that is away would cost the evaluation.
    """
    return record_evaluation(
        log, committed(), plan, during_attempt=during_attempt, again=again, asked=asked, stopping=stopping
    )


def task_name(step: int, plan: EvaluationPlan) -> str:
    """Return what people see of the task run; the held-out suite, which every checkpoint has, goes unnamed."""
    return f"evaluate {step} · {plan.suite.name}" if isinstance(plan.suite, CommandSuite) else f"evaluate {step}"
