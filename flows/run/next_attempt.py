"""Claims the next attempt of a run for this process, with the sizes that earlier attempts leave it."""

import os
import time
from dataclasses import replace
from functools import partial

from flows.run.active_run import ActiveRun
from storage.logs.entry_log import this_writer
from storage.logs.log_entry import CheckpointReference
from storage.logs.run_entries import AttemptEnded, AttemptStarted
from storage.logs.run_state import RunState
from tasks.attempt.attempt_claim import Claimant, claim_attempt
from tasks.attempt.preemption_notice import kubernetes_reason
from tasks.machine.placement import code_version, this_placement
from tasks.policy.attempt_sizes import next_sizes


def claim_next_attempt(run: ActiveRun) -> AttemptStarted:
    """Append attempt-started and return it; raises as `claim_attempt` does."""
    claimant = Claimant(
        lease=run.config.lease,
        budgets=run.config.budgets,
        writer=replace(this_writer(), flow_run_id=run.flow_run_id),
        monotonic=time.monotonic,
        sleep=time.sleep,
        start_over=run.start_over,
        kubernetes_reason=kubernetes_reason(os.environ),
    )
    return run.retry.call(lambda: claim_attempt(run.log, claimant, partial(_claim, run)))


def _claim(run: ActiveRun, number: int, reference: CheckpointReference | None, state: RunState) -> AttemptStarted:
    ends = [attempt.ended for attempt in state.attempts if attempt.ended is not None]
    training, trainers = run.config.training, run.trainers
    sizes = next_sizes(state, training, chosen=run.micro_batch)
    return AttemptStarted(
        attempt=number,
        placement=this_placement(device=training.device, threads=trainers.threads, world_size=trainers.group.size),
        config=run.config.document(),
        config_sha256=run.config.frozen_sha256(),
        code_version=code_version(),
        flow_run_id=run.flow_run_id,
        # No process has more rows than its share: halving a micro-batch beyond it would change nothing.
        micro_batch=min(sizes.micro_batch, trainers.group.rows(training.global_batch)),
        resumed_from=reference,
        activation_checkpointing=sizes.activation_checkpointing,
        quarantined_samples=len(state.quarantined_windows),
        changed=_describe_change(ends[-1]) if ends else "",
    )


def _describe_change(before: AttemptEnded) -> str:
    return f"after {before.reason}: {before.decision.changed}" if before.decision.changed else f"after {before.reason}"
