"""The task `commit-checkpoint`: one log entry makes a segment's staged checkpoint the run's newest."""

from contextlib import suppress
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from cairn.storage.checkpoints import checkpoint
from cairn.storage.errors import AppendUnknown, StoreUnavailable
from cairn.storage.logs import log_entry, run_log
from cairn.storage.stores.object_store import RetryPolicy
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan, pin_for_evaluation
from cairn.tasks.trainer import trainer_process, trainer_protocol


@task(
    name="commit-checkpoint",
    task_run_name="commit-checkpoint {step}, attempt {attempt}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def commit_checkpoint(
    trainer: trainer_process.TrainerProcess,
    log: run_log.RunLog,
    writer: log_entry.Writer,
    segment: trainer_protocol.SegmentDone,
    *,
    attempt: int,
    step: int,
    retry: RetryPolicy,
    evaluation: EvaluationPlan | None = None,
) -> log_entry.CheckpointReference:
    """Wait until it is staged; check, commit and pin it. Raises `TrainerGone`, `IntegrityError` or `Fenced`."""
    staged = trainer.wait_staged(step)
    tokens, gpu_seconds = segment.tokens, segment.gpu_seconds
    commit = partial(checkpoint.commit_checkpoint, log, staged, writer=writer, tokens=tokens, gpu_seconds=gpu_seconds)
    record = retry.call(commit).find(staged.prefix)
    assert record is not None
    reference = record.committed.reference
    if evaluation is not None:
        with suppress(StoreUnavailable, AppendUnknown):  # the commit stands, and the evaluation pins again
            for plan in evaluation.all:
                pin_for_evaluation(log, reference, plan, during_attempt=attempt)
    return reference
