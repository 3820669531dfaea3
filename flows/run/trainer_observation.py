"""Observes one trainer from outside and turns that into evidence; ends a trainer that hangs or whose grace is over."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cairn.flows.orchestrator.cancellation import CancellationWatch
from cairn.storage.errors import Fenced, StorageError
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.attempt.watchdog import HangDetector, HeartbeatGap, detecting_hangs
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import TrainerGone
from cairn.tasks.machine.process_memory import MemoryReading, MemoryWatch, sampling
from cairn.tasks.policy.failures import Evidence, kind_of
from cairn.tasks.trainer.trainer_process import TrainerProcess

_LOST_SECONDS = 6.0
"""Longer than a rank waits until its exception was passed on."""


class TrainerObservation:
    """The evidence about one attempt's trainer, or about its parent while there is no trainer."""

    def __init__(self, config: RunConfig, shutdown: ShutdownSignal, cancellation: CancellationWatch) -> None:
        self.watch = HangDetector(config.watchdog)
        self._grace_seconds = config.checkpoint.grace_seconds
        self._shutdown, self._cancellation = shutdown, cancellation
        self._trainer: TrainerProcess | None = None
        self._memory: MemoryWatch | None = None
        self._gap: HeartbeatGap | None = None
        self._grace_ended = False
        self._lost_machine = self._lost_host = ""

    @contextmanager
    def observing(self, trainer: TrainerProcess) -> Iterator[None]:
        """Watch the trainer while the block runs, and pass every shutdown request on to it."""
        self._trainer, self._memory = trainer, MemoryWatch(trainer.pid)
        on_shutdown = self._shutdown.on_shutdown(self._pass_on_shutdown)
        with sampling(self._memory), detecting_hangs(self.watch, self._kill_hung), on_shutdown:
            yield

    def evidence(self, problem: BaseException | None, *, finished: bool, stopped: bool) -> Evidence:
        """End the trainer if it still runs, and return all evidence; `stopped`: it ended a segment early on request."""
        trainer, code, report = self._trainer, None, None
        if trainer is not None:
            # A trainer that has ended gives its reason; one that still runs has nothing more to do.
            is_over = isinstance(problem, TrainerGone)
            code = trainer.reap() if is_over else trainer.kill()
            report = trainer.received.exception
        memory = self._memory.reading() if self._memory else MemoryReading()
        last = trainer.received.last_step if trainer else None
        return Evidence(
            exit_code=code,
            last_words=report,
            finished=finished,
            stop_signal=self._shutdown.signal or ("SIGTERM" if stopped else None),
            notice=self._shutdown.detail,
            grace_ended=self._grace_ended,
            cancelling=self._cancellation.is_cancelling(),
            cancelled_in=self._cancellation.where,
            fenced=str(problem) if isinstance(problem, Fenced) else None,
            store_error=str(problem) if isinstance(problem, StorageError) else None,
            store_error_kind=kind_of(problem) if isinstance(problem, StorageError) else None,
            silent_seconds=self._gap.seconds if self._gap else None,
            lost_machine=self._lost_machine,
            lost_host=self._lost_host,
            allowed_seconds=self._gap.allowed_seconds if self._gap else None,
            oom_kills=memory.oom_kills,
            rss_bytes=memory.rss_bytes,
            memory_limit_bytes=memory.limit_bytes,
            heartbeat_step=last.record.step if last else None,
            stderr_tail=() if trainer is None else trainer.stacks() if self._gap else trainer.stderr_tail(),
        )

    def _pass_on_shutdown(self) -> None:
        trainer = self._trainer
        if trainer is None:
            return

        def end_grace() -> None:
            if trainer.is_alive:
                self._grace_ended = True
                trainer.kill()

        trainer.notify(signal.SIGTERM)
        _after(self._grace_seconds, end_grace)

    def lose_machine(self, what: str, host: str) -> None:
        """End the trainer soon, because another machine failed: its ranks give their own reason before, if they can."""
        if not self._lost_machine:
            self._lost_machine, self._lost_host = what, host
        if self._trainer is not None:
            _after(_LOST_SECONDS, self._trainer.kill)

    def _kill_hung(self, gap: HeartbeatGap) -> None:
        if self._trainer is not None and self._trainer.is_alive:
            self._gap = gap
            self._trainer.write_stacks()
            self._trainer.kill()


def _after(seconds: float, act: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
