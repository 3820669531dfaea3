"""The step `evaluate`: measures one committed checkpoint in a child process that can fail on its own."""

from collections.abc import Callable
from dataclasses import dataclass

from prefect import task

from cairn.storage.logs import log_entry, run_entries, run_log
from cairn.tasks.configuration.settings import EvaluatorConfig
from cairn.tasks.errors import EvaluationInterrupted
from cairn.tasks.evaluator.curve_reader import CurveReader
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan, record_evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One checkpoint and the suite it is measured under; the other fields are those of `record_evaluation`."""

    reference: log_entry.CheckpointReference
    plan: EvaluationPlan
    during_attempt: int | None = None
    again: bool = False
    on_request: bool = False
    reader: CurveReader | None = None
    note: Callable[[float], object] = lambda share: None

    def __str__(self) -> str:
        """Return the step; only a command's suite is named, since every checkpoint has the held-out one."""
        suite, step = self.plan.suite, self.reference.step
        return f"{step}, {suite.name}" if isinstance(suite, EvaluatorConfig) else f"{step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """A shutdown request stopped the evaluator; nothing failed and nothing is recorded."""

    why: str


Evaluated = run_entries.EvaluationRecorded | run_entries.EvaluationFailed | Interrupted


@task(name="evaluate", task_run_name="evaluate {measurement}", persist_result=False)
def evaluate(measurement: Measurement, log: run_log.RunLog, stopping: Callable[[], bool] = lambda: False) -> Evaluated:
    """Record the evaluation or the evaluator's failure, as `record_evaluation` does."""
    try:
        return record_evaluation(
            log,
            measurement.reference,
            measurement.plan,
            during_attempt=measurement.during_attempt,
            again=measurement.again,
            on_request=measurement.on_request,
            reader=measurement.reader,
            note=measurement.note,
            stopping=stopping,
        )
    except EvaluationInterrupted as interrupted:
        return Interrupted(why=str(interrupted))
