"""A run while this process trains it: what its attempts share, and the services beside them."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from cairn.flows.operations.checkpoint_operations import plan_evaluation
from cairn.flows.orchestrator import flow_run, run_notices, run_overview
from cairn.flows.preparation.training_request import ResolvedRequest
from cairn.reports.exporters.exporters import run_exporters
from cairn.reports.text.progress import Progress
from cairn.storage.errors import StoreRefused
from cairn.storage.logs import log_entry, run_log
from cairn.storage.stores import object_store
from cairn.tasks.attempt import preemption_notice, shutdown_signal
from cairn.tasks.attempt.attempt_entries import DataOrigin
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration import addresses
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import ShutdownRequested
from cairn.tasks.evaluator import curve_reader
from cairn.tasks.machine import placement, process_scopes
from cairn.tasks.policy.curve_verdict import ThroughputWatch
from cairn.tasks.policy.termination import FlowEnd, FlowOutcome
from cairn.tasks.text.format import one_line
from cairn.tasks.trainer import machines, trainer_group, trainer_process


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The process that trains: what ends it, its warm trainer, the flow run that shows it, and who starts it again."""

    shutdown: shutdown_signal.ShutdownSignal
    warm: trainer_process.WarmTrainer
    flow_run: flow_run.FlowRun
    continued_by: str


class ActiveRun:
    """An opened run, how this machine starts its trainers, and the services beside its training.

    `gathering_seconds` is how long the next attempt waited for other machines, `too_few_machines` that it was in vain.
    `limit` is that of the run's set, and `last_step` where it lets this process come to.
    """

    def __init__(
        self, log: run_log.RunLog, config: RunConfig, host: Host, origin: DataOrigin, resolved: ResolvedRequest
    ) -> None:
        """Prepare the services; none runs yet."""
        self.log, self.config, self.host, self.origin = log, config, host, origin
        self.start_over, self.limit = resolved.request.start_over, resolved.limit
        self.last_step = int(min(config.training.steps, self.limit.until_step))
        self.group = trainer_group.trainer_group(config.training, os.environ, spares=config.machines.spares)
        self.machines = machines.Machines(
            self.group.nodes, spares=config.machines.spares, at_least=config.machines.at_least
        )
        self.gathering_seconds, self.too_few_machines = 0.0, ""
        self.work_dir = origin.work_dir
        folder, faults = placement.work_folder(os.environ), os.environ.get("CAIRN_FAULTS", "")
        self.evaluation = plan_evaluation(config, origin.snapshot_id, folder, faults=faults)
        self.progress = Progress(config.training.steps, echo=host.flow_run.echo)
        self.throughput = ThroughputWatch()
        self.curve_reader = curve_reader.CurveReader(log.store, log.prefix)
        self.retry = object_store.run_retry_policy(config.checkpoint.patience_seconds, self.say)
        reader = run_log.RunLog(log.store, log.run_id)  # a log of its own, so that commits never wait for a sweep
        sweep = partial(sweep_run, reader, config.checkpoint, self.evaluation.suite.sha256)
        self.sweep = process_scopes.BackgroundWork(partial(self._sweep, sweep), self._say_sweep_stopped, name="sweep")
        self.overview = run_overview.RunOverview(log, host.flow_run)
        self.cancellation = flow_run.CancellationWatch(host.flow_run, host.shutdown)

    def say(self, message: str) -> None:
        """Print a line for people."""
        self.progress.say(addresses.name_store(message, self.log.store.url, os.environ))

    def is_shutting_down(self) -> bool:
        """Whether a shutdown was requested."""
        return self.host.shutdown.signal is not None

    def note_commit(self, commit: Future[log_entry.CheckpointReference]) -> None:
        """Say that a checkpoint was committed, show it, and sweep; a commit that failed is not noted."""
        if commit.exception() is None:
            reference = commit.result()
            of, pace = f"of {self.config.training.steps}", self.progress.pace()
            self.say(f"  committed step {reference.step} {of}{f' ({pace})' if pace else ''}: {reference.prefix}")
            self.sweep.start()

    def _sweep(self, sweep: Callable[[], object]) -> None:
        sweep()
        self.log.store.reserve()  # before a checkpoint takes the room

    def _say_sweep_stopped(self, error: Exception) -> None:
        self.say(f"  a sweep stopped, the next one continues: {one_line(str(error), 200)}")

    def finish_sweep(self, end: FlowEnd) -> FlowEnd:
        """Sweep once more; return the end, which is an error if the store refuses to delete what nothing needs."""
        with self.progress.doing("deleting checkpoints that nothing needs"):
            refused = self.sweep.finish()
        if not isinstance(refused, StoreRefused) or end.reason != FlowOutcome.COMPLETED:
            return end
        freed = f"but nothing is freed: {refused}; `cairn sweep {self.log.run_id}` frees it once it may"
        return FlowEnd(reason=FlowOutcome.ERROR, message=f"{end.message}; {freed}")

    def is_over(self) -> bool:
        """Read the log; return whether the run is finished and no attempt is open."""
        state = self.log.refresh()
        return state.finished is not None and state.open_attempt is None

    def writer(self, attempt: int | None = None) -> log_entry.Writer:
        """Return this process as the writer of an entry of the attempt."""
        return log_entry.this_writer(attempt=attempt, flow_run_id=self.host.flow_run.id)

    def wait(self, seconds: float) -> None:
        """Wait before the next attempt, unless a shutdown is requested; a trainer starts in the last seconds."""
        woken, waiting = threading.Event(), self.progress.doing(f"waiting {seconds:.0f} s before the next attempt")
        with waiting, self.host.shutdown.on_shutdown(woken.set):
            if not woken.wait(max(0.0, seconds - trainer_process.IMPORT_SECONDS)):
                self.host.warm.start(self.work_dir)
                woken.wait(min(seconds, trainer_process.IMPORT_SECONDS))

    def refuse_to_begin(self, seconds: float = 0.0) -> None:
        """Raise `ShutdownRequested` if a shutdown was requested, or is within so many seconds."""
        woken = threading.Event()
        with self.host.shutdown.on_shutdown(woken.set):
            if woken.wait(seconds):
                raise ShutdownRequested("it was asked to leave before its next attempt")

    def interrupted_end(self, message: str) -> FlowEnd:
        """Return the end at a shutdown request outside of an attempt."""
        if (cancellation := self.cancellation).is_cancelling():
            said = f"a person cancelled it in {cancellation.where}; {message}"
            return FlowEnd(reason=cancellation.outcome, message=said)
        reason = FlowOutcome.INTERRUPTED if self.host.shutdown.signal == "SIGINT" else FlowOutcome.PREEMPTED
        return FlowEnd(reason=reason, message=message)

    @contextmanager
    def running_services(self) -> Iterator[None]:
        """Run the services and listen for every preemption notice while the block runs."""
        rules, group, shutdown = self.config.preemption, self.group, self.host.shutdown
        sources = preemption_notice.notice_sources(rules, os.environ)
        with (
            self.machines.serving(group.rendezvous, trainer_group.rendezvous_secret(os.environ), self.say)
            if group.nodes > 1
            else nullcontext(),
            self.progress.showing(),
            self.overview.published(),
            shutdown.on_shutdown(lambda: self.host.flow_run.settle(None)),  # it leaves: none is waited for
            run_exporters(self.log, self.config.exporters, os.environ, self.say),
            run_notices.delivering_notices(self.log, self.config.notify, self.say),
            self.cancellation.watching(),
            shutdown.listening(rules.signal),
            preemption_notice.polling_notices(shutdown, sources, poll_seconds=rules.poll_seconds, on_problem=self.say),
        ):
            yield
