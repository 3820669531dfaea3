"""A run while this process trains it: what all its attempts share, and how it claims the next one."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cairn.flows.orchestrator.cancellation import CancellationWatch
from cairn.flows.orchestrator.flow_run import FlowRun
from cairn.flows.orchestrator.run_notices import all_receivers, notices_of
from cairn.flows.orchestrator.run_overview import RunOverview
from cairn.flows.run.progress import Progress
from cairn.reports.exporters.exporters import run_exporters
from cairn.reports.notices.notice_delivery import delivering_notices
from cairn.storage.checkpoints.sweep import SweepReport
from cairn.storage.errors import StorageError
from cairn.storage.logs import log_entry, run_entries, run_log, run_state
from cairn.storage.stores import object_store
from cairn.tasks.attempt import attempt_claim, attempt_end, preemption_notice, shutdown_signal
from cairn.tasks.configuration import run_configuration
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan
from cairn.tasks.machine import machine_speed, placement
from cairn.tasks.policy import attempt_sizes, curve_statistics
from cairn.tasks.policy.termination import FlowEnd, FlowOutcome
from cairn.tasks.text.format import format_count, one_line
from cairn.tasks.trainer import trainer_group, warm_trainer
from cairn.tasks.trainer.machines import Machines


class BackgroundSweep:
    """Sweeps of one run beside its training, never two at once; none delays or fails the run."""

    def __init__(self, sweep: Callable[[], SweepReport], say: Callable[[str], None]) -> None:
        """Prepare without reading; `sweep` has a log reader of its own, so that commits never wait for it."""
        self._sweep, self._say = sweep, say
        self._idle = threading.Event()
        self._idle.set()

    def start(self) -> None:
        """Start a sweep unless one is running; what that one misses, the next one deletes."""
        if self._idle.is_set():
            self._idle.clear()
            threading.Thread(target=self._run, name="sweep", daemon=True).start()

    def finish(self) -> None:
        """Sweep once more after the running sweep, when no attempt is open and no evaluation is outstanding."""
        self._idle.wait()
        self.start()
        self._idle.wait()

    def _run(self) -> None:
        try:
            self._sweep()
        except StorageError as error:
            self._say(f"  a sweep stopped, the next one continues: {one_line(str(error), 200)}")
        finally:
            self._idle.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The process that trains: what ends it, its warm trainer, the flow run that shows it, and who starts it again."""

    shutdown: shutdown_signal.ShutdownSignal
    warm: warm_trainer.WarmTrainer
    flow_run: FlowRun
    continued_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveRun:
    """An opened run, how this machine starts its trainers, and the services beside its training.

    `micro_batch` is what the first attempt chose for `auto`; `gathering_seconds` is how long the next one waited for
    other machines, `too_few_machines` that it was in vain.
    """

    log: run_log.RunLog
    config: run_configuration.RunConfig
    host: Host
    start_over: bool
    micro_batch: int | None
    evaluation: EvaluationPlan
    origin: attempt_end.DataOrigin
    group: trainer_group.TrainerGroup
    work_dir: Path
    threads: int
    progress: Progress
    sweep: BackgroundSweep
    overview: RunOverview
    cancellation: CancellationWatch
    retry: object_store.RetryPolicy
    machines: Machines
    gathering_seconds: float = 0.0
    too_few_machines: str = ""
    throughput: curve_statistics.ThroughputWatch = field(default_factory=curve_statistics.ThroughputWatch)

    def say(self, message: str) -> None:
        """Print a line for people."""
        self.progress.say(message)

    def is_shutting_down(self) -> bool:
        """Whether a shutdown was requested."""
        return self.host.shutdown.signal is not None

    def note_commit(self, commit: Future[log_entry.CheckpointReference]) -> None:
        """Say that a checkpoint was committed, show it, and sweep; a commit that failed is not noted."""
        if commit.exception() is None:
            reference = commit.result()
            self.say(f"  committed step {reference.step}: {reference.prefix}")
            self.overview.change()
            self.sweep.start()

    def is_over(self) -> bool:
        """Read the log; return whether the run is finished and no attempt is open."""
        state = self.log.refresh()
        return state.finished is not None and state.open_attempt is None

    def writer(self, attempt: int | None = None) -> log_entry.Writer:
        """Return this process as the writer of an entry of the attempt."""
        return log_entry.this_writer(attempt=attempt, flow_run_id=self.host.flow_run.id)

    def wait(self, seconds: float) -> None:
        """Wait before the next attempt, unless a shutdown is requested; a trainer starts in the last seconds."""
        woken = threading.Event()
        with self.host.shutdown.on_shutdown(woken.set):
            if not woken.wait(max(0.0, seconds - warm_trainer.IMPORT_SECONDS)):
                self.host.warm.start(self.work_dir)
                woken.wait(min(seconds, warm_trainer.IMPORT_SECONDS))

    def interrupted_end(self, message: str) -> FlowEnd:
        """Return the end at a shutdown request outside of an attempt, or without the machines for one."""
        if self.cancellation.is_cancelling():
            return FlowEnd(reason=FlowOutcome.CANCELLED, message=message)
        reason = FlowOutcome.INTERRUPTED if self.host.shutdown.signal == "SIGINT" else FlowOutcome.PREEMPTED
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
            self.host.shutdown.on_shutdown(lambda: self.host.flow_run.settle(None)),  # it leaves: none is waited for
            run_exporters(self.log, self.config.exporters, os.environ, self.say),
            delivering_notices(
                self.log.store, all_receivers(self.config.notify), partial(notices_of, self.log), self.say
            ),
            self.cancellation.watching(),
            self.host.shutdown.listening(rules.signal),
            preemption_notice.polling_notices(
                self.host.shutdown, sources, poll_seconds=rules.poll_seconds, on_problem=self.say
            ),
        ):
            yield


def starter(environment: Mapping[str, str], default: str = "person") -> str:
    """Return who starts this run again: as the batch script or manifest says, else the default."""
    return environment.get("CAIRN_CONTINUED_BY", "").strip() or default


def claim_next_attempt(run: ActiveRun) -> run_entries.AttemptStarted:
    """Append attempt-started, say how the attempt begins, and return it; raises as `claim_attempt` does."""
    claimant = attempt_claim.Claimant(
        lease=run.config.lease,
        budgets=run.config.budgets,
        writer=run.writer(),
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
        run.host.warm.set_command(group.command())
    return replace(run, group=group, gathering_seconds=seconds, too_few_machines=failed)


def _claim(
    run: ActiveRun, number: int, reference: log_entry.CheckpointReference | None, state: run_state.RunState
) -> run_entries.AttemptStarted:
    ends = [attempt.ended for attempt in state.attempts if attempt.ended is not None]
    training, nodes, processes = run.config.training, run.group.nodes, run.group.size
    sizes = attempt_sizes.next_sizes(state, training, processes=processes, chosen=run.micro_batch)
    device = placement.resolved_device(
        training.device, on_cuda=machine_speed.trains_on_cuda(training.device), processes=processes
    )
    place = placement.this_placement(device=device, threads=run.threads, world_size=processes)
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
        versions=placement.library_versions(),
        faults=run.evaluation.faults,
        gathering_seconds=run.gathering_seconds,
        changed=": ".join(filter(None, (f"after {ends[-1].reason}", ends[-1].decision.changed))) if ends else "",
    )
