"""The task `evaluate`: measures one committed checkpoint in a child process that can fail on its own."""

from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from cairn.storage.logs import log_entry, run_entries, run_log
from cairn.tasks.configuration.settings import EvaluatorConfig
from cairn.tasks.errors import EvaluationInterrupted
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan, record_evaluation


@task(name="evaluate", task_run_name="evaluate {step}", cache_policy=NO_CACHE, persist_result=False)
def evaluate(
    log: run_log.RunLog,
    committed: Callable[[], log_entry.CheckpointReference],
    plan: EvaluationPlan,
    *,
    step: int,
    during_attempt: int | None = None,
    again: bool = False,
    on_request: bool = False,
    stopping: Callable[[], bool] = lambda: False,
) -> run_entries.EvaluationRecorded | run_entries.EvaluationFailed | State[Any]:
    """Wait for `committed`, then record the evaluation or the evaluator's failure, as `record_evaluation` does.

    An interrupted evaluation returns the state Cancelled: for an exception Prefect logs a traceback. `committed` is no
    Prefect future: its state would be asked of the API, and an unreachable API would fail the evaluation.
    """
    reference = committed()
    try:
        return record_evaluation(
            log, reference, plan, during_attempt=during_attempt, again=again, on_request=on_request, stopping=stopping
        )
    except EvaluationInterrupted as interrupted:
        return Cancelled(message=str(interrupted))


def task_name(step: int, plan: EvaluationPlan) -> str:
    """Return the task run's name; only a command's suite is named, since every checkpoint has the held-out one."""
    return f"evaluate {step}, {plan.suite.name}" if isinstance(plan.suite, EvaluatorConfig) else f"evaluate {step}"
