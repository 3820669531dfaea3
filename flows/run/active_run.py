"""A run while this process trains it: what all its attempts share, and how it claims the next one."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cairn.flows.orchestrator.cancellation import CancellationWatch
from cairn.flows.orchestrator.run_notices import all_receivers, notices_of
from cairn.flows.orchestrator.run_overview import RunOverview
from cairn.flows.run.progress import Progress
from cairn.reports.exporters.exporters import run_exporters
from cairn.reports.notices.notice_delivery import delivering_notices
from cairn.storage.logs import log_entry, run_entries, run_log, run_state
from cairn.storage.stores import document, object_store
from cairn.tasks.attempt import attempt_claim, attempt_end, preemption_notice, shutdown_signal
from cairn.tasks.configuration import run_configuration, settings
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan
from cairn.tasks.machine import machine_speed, placement
from cairn.tasks.policy.attempt_sizes import next_sizes
from cairn.tasks.policy.curve_statistics import ThroughputWatch
from cairn.tasks.policy.termination import FlowEnd, FlowOutcome
from cairn.tasks.sweep_checkpoints import sweep_checkpoints
from cairn.tasks.text.format import format_count, one_line
from cairn.tasks.trainer import trainer_group, warm_trainer
from cairn.tasks.trainer.machines import Machines


class BackgroundSweep:
    """Sweeps of one run beside its training, as Prefect tasks, never two at once; none delays or fails the run."""

    def __init__(
        self, store: object_store.ObjectStore, run_id: str, policy: settings.CheckpointConfig, suite_sha256: str
    ) -> None:
        """Prepare without reading; the sweep has its own log reader, so that commits never wait for it."""
        self._sweep = partial(sweep_checkpoints.submit, run_log.RunLog(store, run_id), policy, suite_sha256)
        self._idle = threading.Event()
        self._idle.set()

    def submit(self, moment: str) -> None:
        """Start a sweep unless one is running; what that one misses, the next one deletes."""
        if self._idle.is_set():
            future = self._sweep(moment=moment)
            self._idle.clear()  # only now: a sweep that could not be submitted is not waited for
            future.add_done_callback(lambda _: self._idle.set())

    def finish(self) -> None:
        """Sweep once more after the running sweep, when no attempt is open and no evaluation is outstanding."""
        self._idle.wait()
        self.submit("at the end")
        self._idle.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveRun:
    """An opened run, how this machine starts its trainers, and the services beside its training.

    `micro_batch` is what the first attempt chose for `auto`; `gathering_seconds` is how long the next one waited for
    other machines, `too_few_machines` that it was in vain.
    """

    log: run_log.RunLog
    config: run_configuration.RunConfig
    flow_run_id: str | None
    continued_by: str
    start_over: bool
    micro_batch: int | None
    evaluation: EvaluationPlan
    origin: attempt_end.DataOrigin
    warm: warm_trainer.WarmTrainer
    group: trainer_group.TrainerGroup
    work_dir: Path
    threads: int
    progress: Progress
    sweep: BackgroundSweep
    overview: RunOverview
    cancellation: CancellationWatch
    shutdown: shutdown_signal.ShutdownSignal
    retry: object_store.RetryPolicy
    machines: Machines
    gathering_seconds: float = 0.0
    too_few_machines: str = ""
    throughput: ThroughputWatch = field(default_factory=ThroughputWatch)

    def say(self, message: str) -> None:
        """Print a line for people."""
        self.progress.say(message)

    def is_shutting_down(self) -> bool:
        """Whether a shutdown was requested."""
        return self.shutdown.signal is not None

    def interrupted_end(self, message: str) -> FlowEnd:
        """Return the end at a shutdown request outside of an attempt, or without the machines for one."""
        if self.cancellation.is_cancelling():
            return FlowEnd(reason=FlowOutcome.CANCELLED, message=message)
        reason = FlowOutcome.INTERRUPTED if self.shutdown.signal == "SIGINT" else FlowOutcome.PREEMPTED
        return FlowEnd(reason=reason, message=message)

    @contextmanager
    def running_services(self) -> Iterator[None]:
        """Run the services and listen for every preemption notice while the block runs."""
        rules, group = self.config.preemption, self.group
        sources = preemption_notice.notice_sources(rules, os.environ)
        with (
            self.machines.serving(group.rendezvous, trainer_group.rendezvous_secret(os.environ))
            if group.nodes > 1
            else nullcontext(),
            self.progress.showing(),
            self.overview.published(),
            run_exporters(self.log, self.config.exporters, os.environ, self.say),
            delivering_notices(
                self.log.store, all_receivers(self.config.notify), partial(notices_of, self.log), self.say
            ),
            self.cancellation.watching(),
            self.shutdown.listening(rules.signal),
            preemption_notice.polling_notices(
                self.shutdown, sources, poll_seconds=rules.poll_seconds, on_problem=self.say
            ),
        ):
            yield


def claim_next_attempt(run: ActiveRun) -> run_entries.AttemptStarted:
    """Append attempt-started, say how the attempt begins, and return it; raises as `claim_attempt` does."""
    claimant = attempt_claim.Claimant(
        lease=run.config.lease,
        budgets=run.config.budgets,
        writer=replace(log_entry.this_writer(), flow_run_id=run.flow_run_id),
        monotonic=time.monotonic,
        sleep=time.sleep,
        start_over=run.start_over,
        kubernetes_reason=partial(preemption_notice.kubernetes_reason, os.environ),
    )
    started = run.retry.call(lambda: attempt_claim.claim_attempt(run.log, claimant, partial(_claim, run)))
    opened, place = run.log.state.opened, started.placement
    origin = f"resumes from step {started.resumed_from.step}" if started.resumed_from else "starts at step 0"
    run.say(f"attempt {started.attempt} {origin} of {run.config.training.steps}")
    for record in run.log.state.checkpoints:
        if record.state == run_state.CheckpointState.QUARANTINED and record.committed.step > started.first_step:
            run.say(f"  not from step {record.committed.step}, which is quarantined: {one_line(record.detail, 200)}")
    if started.attempt == 1 and opened is not None:
        run.say(f"  {format_count(place.threads, 'thread')}, frozen with the run: {opened.threads_why}")
    elif place.threads > place.cores:
        run.say(f"  {place.threads} threads, frozen with the run, share {place.cores} cores: equal bits, slower")
    return started


def gather_machines(run: ActiveRun) -> ActiveRun | None:
    """Return the run with the machines of its next attempt, or with `too_few_machines`; None at a notice to leave."""
    rules, wanted = run.config.machines, run.machines.nodes
    if wanted == 1:
        return run
    here, seconds = 1, 0.0
    if not (failed := placement.check_machine(rules)):
        began = time.monotonic()
        if run.machines.gather(0.0, is_stopping=run.is_shutting_down) < wanted:
            run.say(f"waits for {wanted} machines, with this one, at {run.group.rendezvous} …")
        here = run.machines.gather(rules.wait_seconds, is_stopping=run.is_shutting_down)
        seconds = time.monotonic() - began
        if run.is_shutting_down():
            return None
        if here < min(rules.at_least or wanted, wanted):
            failed = f"{here} of {wanted} machines were here after {seconds:.0f} s"
        elif here < wanted:
            run.say(f"goes on with {here} of {wanted} machines: no more have come within {seconds:.0f} s")
    # Too few are claimed by the first machine alone: of several, not every number can share the micro-batches.
    group = replace(run.group, nodes=1 if failed else here)
    if not failed:
        run.warm.set_command(group.command())
    return replace(run, group=group, gathering_seconds=seconds, too_few_machines=failed)


def _claim(
    run: ActiveRun, number: int, reference: log_entry.CheckpointReference | None, state: run_state.RunState
) -> run_entries.AttemptStarted:
    ends = [attempt.ended for attempt in state.attempts if attempt.ended is not None]
    training, nodes, processes = run.config.training, run.group.nodes, run.group.size
    sizes = next_sizes(state, training, processes=processes, chosen=run.micro_batch)
    device = placement.resolved_device(
        training.device, on_cuda=machine_speed.trains_on_cuda(training.device), processes=processes
    )
    place = placement.this_placement(device=device, threads=run.threads, world_size=processes)
    return document.project(
        sizes,
        run_entries.AttemptStarted,
        attempt=number,
        placement=replace(
            place,
            device_name=machine_speed.device_name(device),
            cores=placement.usable_cores(),
            nodes=nodes,
            nodes_wanted=run.machines.nodes,
            hosts=(place.host, *run.machines.hosts(nodes)) if nodes > 1 else (),
            continued_by=run.continued_by,
        ),
        config=run.config.document(),
        config_sha256=run.config.frozen_sha256(),
        code_version=placement.code_version(),
        flow_run_id=run.flow_run_id,
        resumed_from=reference,
        quarantined_samples=len(state.quarantined_windows),
        versions=placement.library_versions(),
        faults=run.evaluation.faults,
        gathering_seconds=run.gathering_seconds,
        changed=": ".join(filter(None, (f"after {ends[-1].reason}", ends[-1].decision.changed))) if ends else "",
    )
