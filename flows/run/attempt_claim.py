"""How the next attempt begins: its machines are gathered and its entry is claimed, unless this process has to leave."""

import os
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

from cairn.flows.run.active_run import ActiveRun
from cairn.storage.logs import log_entry, run_entries, run_state
from cairn.tasks.attempt import attempt_entries, preemption_notice
from cairn.tasks.configuration.network_module import module_versions
from cairn.tasks.errors import BudgetExhausted
from cairn.tasks.machine import machine_speed, placement
from cairn.tasks.policy import attempt_sizes, budgets
from cairn.tasks.text.format import one_line


def claim_next_attempt(run: ActiveRun) -> run_entries.AttemptStarted:
    """Append attempt-started, say how the attempt begins, and return it.

    Raises as `claim_attempt` does, BudgetExhausted where `cost.limit` is spent, and `ShutdownRequested` at a notice
    before the entry is written.
    """
    _refuse_if_too_dear(run)
    run.log.store.reserve()
    config, writer, why = run.config, run.writer(), partial(preemption_notice.kubernetes_reason, os.environ)
    claimant = attempt_entries.Claimant(
        lease=config.lease,
        budgets=config.budgets,
        writer=writer,
        sleep=run.refuse_to_begin,
        start_over=run.start_over,
        kubernetes_reason=why,
    )
    claims = list[str]()

    def start(*given: Any) -> run_entries.AttemptStarted:
        made = _claim(run, *given)
        claims.append(made.claim_id)
        return made

    def claim() -> run_entries.AttemptStarted:
        owner = run.log.refresh().open_attempt if claims else None
        if owner is not None and owner.started.claim_id in claims:  # a claim of unknown outcome was written
            return owner.started
        return attempt_entries.claim_attempt(run.log, claimant, start)

    # Once an entry may be written, no notice leaves it without a receipt.
    retry = replace(run.retry, sleep=lambda seconds: time.sleep(seconds) if claims else run.refuse_to_begin(seconds))
    started = retry.call(claim)
    place = started.placement
    origin = f"resumes from step {started.resumed_from.step}" if started.resumed_from else "starts at step 0"
    run.say(f"attempt {started.attempt} {origin} of {run.config.training.steps}")
    for record in run.log.state.checkpoints:
        if record.state == run_state.CheckpointState.QUARANTINED and record.committed.step > started.first_step:
            run.say(f"  not from step {record.committed.step}, which is quarantined: {one_line(record.detail, 200)}")
    if place.threads > place.cores:
        run.say(f"  {place.threads} threads, frozen with the run, share {place.cores} cores: equal bits, slower")
    return started


def _refuse_if_too_dear(run: ActiveRun) -> None:
    state, checkpoint, spent = run.log.state, run.config.checkpoint, budgets.read_spent(run.log.state)
    step, seconds = state.resume_step, spent.seconds_per_step / run.group.size or None
    until = attempt_sizes.segment_end(step, checkpoint, total_steps=run.last_step, step_seconds=seconds)
    if step < run.last_step and (why := budgets.limit_problem(run.config.cost, spent, next_steps=until - step)):
        raise BudgetExhausted(f"run {run.log.run_id}: {why}; the same command with a higher cost.limit continues")


def gather_machines(run: ActiveRun) -> None:
    """Wait for the machines of the next attempt; raises `ShutdownRequested` at a notice. See `gathering_seconds`."""
    rules, wanted = run.config.machines, run.machines.nodes
    run.refuse_to_begin()
    if wanted == 1:
        return
    here = 1
    run.gathering_seconds = 0.0
    if not (failed := placement.check_machine(rules)):
        began = time.monotonic()
        if run.machines.gather(0.0, is_stopping=run.is_shutting_down) < wanted:
            run.say(f"waits for {wanted} machines, with this one, at {run.group.rendezvous} …")
        here = run.machines.gather(rules.wait_seconds, is_stopping=run.is_shutting_down)
        run.gathering_seconds = seconds = time.monotonic() - began
        run.refuse_to_begin()
        if here < min(rules.at_least or wanted, wanted):
            failed = f"{here} of {wanted} machines were here after {seconds:.0f} s"
        elif here < wanted:
            run.say(f"goes on with {here} of {wanted} machines: no more have come within {seconds:.0f} s")
    # Too few are claimed by the first machine alone: of several, not every number can share the micro-batches.
    run.group, run.too_few_machines = replace(run.group, nodes=1 if failed else here), failed
    if not failed:
        run.host.warm.set_command(run.group.command())


def _claim(
    run: ActiveRun, number: int, reference: log_entry.CheckpointReference | None, state: run_state.RunState
) -> run_entries.AttemptStarted:
    run.refuse_to_begin()
    ends = [attempt.ended for attempt in state.attempts if attempt.ended is not None]
    training, nodes, processes = run.config.training, run.group.nodes, run.group.size
    on_cuda, block_size = machine_speed.trains_on_cuda(training.device), run.config.model.block_size
    sizes = attempt_sizes.next_sizes(state, training, block_size, processes=processes, on_cpu=not on_cuda)
    device = placement.resolved_device(training.device, on_cuda=on_cuda, processes=processes)
    place = placement.this_placement(device=device, threads=training.threads, world_size=processes)
    return run_entries.AttemptStarted(
        attempt=number,
        micro_batch=sizes.micro_batch,
        activation_checkpointing=sizes.activation_checkpointing,
        placement=replace(
            place,
            device_name=machine_speed.device_name(device),
            cores=placement.usable_cores(),
            nodes=nodes,
            nodes_wanted=run.machines.nodes,
            hosts=(place.host, *run.machines.hosts(nodes)) if nodes > 1 else (),
            continued_by=run.host.continued_by,
        ),
        config=run.config.document(),
        config_sha256=run.config.frozen_sha256(),
        code_version=placement.code_version(),
        resumed_from=reference,
        quarantined_samples=len(state.quarantined_windows),
        versions=placement.library_versions() | module_versions(run.config.model),
        faults=run.evaluation.faults,
        gathering_seconds=run.gathering_seconds,
        claim_id=uuid.uuid4().hex[:12],
        changed=": ".join(filter(None, (f"after {ends[-1].reason}", ends[-1].decision.changed))) if ends else "",
    )
