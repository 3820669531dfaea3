"""A run while this process trains it: what all its attempts share."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

from prefect.futures import PrefectFuture

from flows.orchestrator.cancellation import CancellationWatch
from flows.orchestrator.run_notices import all_receivers, notices_of
from flows.orchestrator.run_overview import RunOverview
from flows.run.progress import Progress
from reports.exporters.exporters import run_exporters
from reports.notices.notice_delivery import telling
from storage.logs.run_log import RunLog
from storage.stores.object_store import ObjectStore
from tasks.attempt.attempt_end import DataOrigin
from tasks.attempt.preemption_notice import notice_sources, polling_notices
from tasks.attempt.shutdown_signal import ShutdownSignal
from tasks.attempt.store_retry import StoreRetry
from tasks.configuration.run_configuration import RunConfig
from tasks.configuration.settings import CheckpointConfig
from tasks.evaluator.evaluation_run import EvaluationPlan
from tasks.policy.curve_statistics import ThroughputWatch
from tasks.sweep_checkpoints import sweep_checkpoints
from tasks.trainer.machines import Machines
from tasks.trainer.trainer_group import TrainerGroup, rendezvous_secret
from tasks.trainer.warm_trainer import WarmTrainer


class BackgroundSweep:
    """Sweeps of one run beside its training, as Prefect tasks, never two at once; none delays or fails the run."""

    def __init__(self, store: ObjectStore, run_id: str, policy: CheckpointConfig, suite_sha256: str) -> None:
        """Prepare without reading; the sweep has its own log reader, so that commits never wait for it."""
        self._sweep = partial(sweep_checkpoints.submit, RunLog(store, run_id), policy, suite_sha256)
        self._future: PrefectFuture[Any] | None = None
        self._idle = threading.Event()
        self._idle.set()

    def submit(self, moment: str) -> None:
        """Start a sweep unless one is running; what that one misses, the next one deletes."""
        if self._idle.is_set():
            self._idle.clear()
            self._future = self._sweep(moment=moment)
            self._future.add_done_callback(lambda _: self._idle.set())

    def finish(self) -> None:
        """Sweep once more after the running sweep, when no attempt is open and no evaluation is outstanding."""
        if self._future is not None:
            self._future.wait()
        self.submit("at the end")
        if self._future is not None:
            self._future.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSetup:
    """How this machine starts the run's trainers."""

    warm: WarmTrainer
    group: TrainerGroup
    work_dir: Path
    threads: int
    faults: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveRun:
    """An opened run, and the services beside its training; `micro_batch` is what the first attempt chose for `auto`.

    `gathering_seconds` is how long the next attempt waited for other machines, `too_few_machines` that it was in vain.
    """

    log: RunLog
    config: RunConfig
    flow_run_id: str | None
    continued_by: str
    start_over: bool
    micro_batch: int | None
    evaluation: EvaluationPlan
    origin: DataOrigin
    trainers: TrainerSetup
    progress: Progress
    sweep: BackgroundSweep
    overview: RunOverview
    cancellation: CancellationWatch
    shutdown: ShutdownSignal
    retry: StoreRetry
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

    @contextmanager
    def running_services(self) -> Iterator[None]:
        """Run the services and listen for every preemption notice while the block runs."""
        rules, group = self.config.preemption, self.trainers.group
        sources = notice_sources(rules, environ)
        with (
            self.machines.serving(group.rendezvous, rendezvous_secret(environ)) if group.nodes > 1 else nullcontext(),
            self.progress.showing(),
            self.overview.published(),
            run_exporters(self.log, self.config.mirrors, environ, self.say),
            telling(self.log.store, all_receivers(self.config.notify), partial(notices_of, self.log), self.say),
            self.cancellation.watching(),
            self.shutdown.listening(rules.signal),
            polling_notices(self.shutdown, sources, poll_seconds=rules.poll_seconds, on_problem=self.say),
        ):
            yield
