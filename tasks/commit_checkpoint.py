"""The step `commit-checkpoint`: one log entry makes a segment's staged checkpoint the run's newest."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from prefect import task

from cairn.storage.checkpoints import checkpoint
from cairn.storage.errors import AppendUnknown, StoreUnavailable
from cairn.storage.logs import log_entry, run_entries, run_log
from cairn.storage.stores.object_store import RetryPolicy
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan, pin_for_evaluation
from cairn.tasks.trainer.trainer_protocol import SegmentDone


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The checkpoint of a trained segment: who commits it, and the plans by which it is evaluated next."""

    attempt: int
    done: SegmentDone
    writer: log_entry.Writer
    retry: RetryPolicy
    evaluations: tuple[EvaluationPlan, ...] = ()

    def __str__(self) -> str:
        return f"{self.done.step}, attempt {self.attempt}"


WaitStaged = Callable[[int], run_entries.StagedCheckpoint]
"""Waits until the checkpoint of a step is staged; raises `TrainerGone`."""


@task(name="commit-checkpoint", task_run_name="commit-checkpoint {commit}", persist_result=False)
def commit_checkpoint(commit: Commit, wait_staged: WaitStaged, log: run_log.RunLog) -> log_entry.CheckpointReference:
    """Wait until it is staged; check, commit and pin it. Raises `TrainerGone`, `IntegrityError` or `Fenced`."""
    staged, done = wait_staged(commit.done.step), commit.done
    for attempt in commit.retry.attempts():
        with attempt:
            checkpoint.commit_checkpoint(
                log, staged, writer=commit.writer, tokens=done.tokens, gpu_seconds=done.gpu_seconds
            )
    record = log.state.find(staged.prefix)
    assert record is not None
    reference = record.committed.reference
    with suppress(StoreUnavailable, AppendUnknown):  # the commit stands, and the evaluation pins again
        for plan in commit.evaluations:
            pin_for_evaluation(log, reference, plan, during_attempt=commit.attempt)
    return reference
