"""A run while this process trains it: what all its attempts share."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from os import environ
from pathlib import Path

from flows.orchestrator.cancellation import CancellationWatch
from flows.orchestrator.run_notices import all_receivers, notices_of
from flows.orchestrator.run_overview import RunOverview
from flows.run.background_sweep import BackgroundSweep
from flows.run.progress import Progress
from reports.exporters.exporters import run_exporters
from reports.notices.notice_delivery import telling
from storage.logs.run_log import RunLog
from tasks.attempt.attempt_end import DataOrigin
from tasks.attempt.preemption_notice import notice_sources, polling_notices
from tasks.attempt.shutdown_signal import ShutdownSignal
from tasks.attempt.store_retry import StoreRetry
from tasks.configuration.run_configuration import RunConfig
from tasks.evaluator.evaluation_run import EvaluationPlan
from tasks.policy.run_symptoms import ThroughputWatch
from tasks.trainer.machines import Machines
from tasks.trainer.trainer_group import TrainerGroup, rendezvous_secret
from tasks.trainer.warm_trainer import WarmTrainer


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
