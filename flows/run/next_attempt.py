"""Claims a run's next attempt with the sizes it trains with, where it runs, and what changed since the last one."""

import os
import time
from dataclasses import replace
from functools import partial

from flows.run.active_run import ActiveRun
from storage.logs.log_entry import CheckpointReference, this_writer
from storage.logs.run_entries import AttemptStarted
from storage.logs.run_state import RunState
from tasks.attempt.attempt_claim import Claimant, claim_attempt
from tasks.attempt.preemption_notice import kubernetes_reason
from tasks.machine.machine_speed import device_name, trains_on_cuda
from tasks.machine.placement import (
    check_machine,
    code_version,
    library_versions,
    resolved_device,
    this_placement,
    usable_cores,
)
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
        kubernetes_reason=partial(kubernetes_reason, os.environ),
    )
    return run.retry.call(lambda: claim_attempt(run.log, claimant, partial(_claim, run)))


def gather_machines(run: ActiveRun) -> ActiveRun | None:
    """Return the run with the machines of its next attempt, or with `too_few_machines`; None at a notice to leave."""
    rules, wanted = run.config.machines, run.machines.nodes
    if wanted == 1:
        return run
    if failed := check_machine(rules):
        return _without_machines(run, failed, seconds=0.0)
    began = time.monotonic()
    if run.machines.gather(0.0, is_stopping=run.is_shutting_down) < wanted:
        run.say(f"waits for {wanted} machines, with this one, at {run.trainers.group.rendezvous} …")
    here = run.machines.gather(rules.wait_seconds, is_stopping=run.is_shutting_down)
    seconds, group = time.monotonic() - began, replace(run.trainers.group, nodes=here)
    if run.is_shutting_down():
        return None
    if here < min(rules.at_least or wanted, wanted):
        return _without_machines(run, f"{here} of {wanted} machines were here after {seconds:.0f} s", seconds=seconds)
    if here < wanted:
        run.say(f"goes on with {here} of {wanted} machines: no more have come within {seconds:.0f} s")
    run.trainers.warm.set_command(group.command())
    return replace(run, trainers=replace(run.trainers, group=group), gathering_seconds=seconds)


def _without_machines(run: ActiveRun, why: str, *, seconds: float) -> ActiveRun:
    """Return the run as its first machine claims it alone: of several, not every number can share the micro-batches."""
    trainers = replace(run.trainers, group=replace(run.trainers.group, nodes=1))
    return replace(run, trainers=trainers, gathering_seconds=seconds, too_few_machines=why)


def _claim(run: ActiveRun, number: int, reference: CheckpointReference | None, state: RunState) -> AttemptStarted:
    ends = [attempt.ended for attempt in state.attempts if attempt.ended is not None]
    training, trainers = run.config.training, run.trainers
    sizes = next_sizes(state, training, processes=trainers.group.size, chosen=run.micro_batch)
    on_cuda, processes = trains_on_cuda(training.device), trainers.group.size
    device = resolved_device(training.device, on_cuda=on_cuda, processes=processes)
    place, nodes = this_placement(device=device, threads=trainers.threads, world_size=processes), trainers.group.nodes
    return AttemptStarted(
        attempt=number,
        placement=replace(
            place,
            device_name=device_name(device),
            cores=usable_cores(),
            nodes=nodes,
            nodes_wanted=run.machines.nodes,
            hosts=(place.host, *run.machines.hosts(nodes)) if nodes > 1 else (),
            continued_by=run.continued_by,
        ),
        config=run.config.document(),
        config_sha256=run.config.frozen_sha256(),
        code_version=code_version(),
        flow_run_id=run.flow_run_id,
        micro_batch=sizes.micro_batch,
        resumed_from=reference,
        activation_checkpointing=sizes.activation_checkpointing,
        quarantined_samples=len(state.quarantined_windows),
        versions=library_versions(),
        faults=trainers.faults,
        gathering_seconds=run.gathering_seconds,
        changed=": ".join(filter(None, (f"after {ends[-1].reason}", ends[-1].decision.changed))) if ends else "",
    )
