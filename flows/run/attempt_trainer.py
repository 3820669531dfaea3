"""The trainer of one attempt: its segments, what is observed of it from outside, and the evidence when it ends."""

import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

from cairn.flows.preparation.preflight import available_memory, choose_workers, free_bytes, memory_room
from cairn.flows.run import active_run, run_decisions
from cairn.storage.errors import Fenced, StorageError
from cairn.storage.logs import log_entry, run_entries, run_members, step_log
from cairn.storage.snapshots.data_snapshot import read_manifest
from cairn.tasks.attempt import attempt_entries, injected_faults, watchdog
from cairn.tasks.attempt.attempt_entries import AttemptOver, end_attempt
from cairn.tasks.errors import TrainerGone
from cairn.tasks.machine.arithmetic import arithmetic_before, describe_move
from cairn.tasks.machine.process_memory import MemoryReading, MemoryWatch, sampling
from cairn.tasks.policy import budgets, termination
from cairn.tasks.policy.attempt_sizes import MemoryRoom, segment_end, sizes_of, stall_seconds
from cairn.tasks.policy.failures import Evidence, ExceptionReport, Failure, classify, kind_of
from cairn.tasks.train_segment import Segment
from cairn.tasks.trainer import trainer_process, trainer_protocol

_LOST_SECONDS = 6.0
"""Longer than a rank waits until its exception was passed on."""


class AttemptTrainer:
    """The trainer's process, which lives as long as the attempt; before it starts and after it ends there is none."""

    def __init__(self, run: active_run.ActiveRun, started: run_entries.AttemptStarted) -> None:
        self._run, self._started = run, started
        self._detector = watchdog.HangDetector(run.config.watchdog)
        self._process: trainer_process.TrainerProcess | None = None
        self._memory: MemoryWatch | None = None
        self._gap: watchdog.HeartbeatGap | None = None
        self._grace_ended = self._is_stopped = False
        self._symptom = self._behind = self._too_dear = self._unaffordable = ""
        self._began, self._ready_at = time.monotonic(), math.inf

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the process, observe it and pass every shutdown request on to it; have it exit after the block."""
        run, recorder = self._run, ThreadPoolExecutor(1, thread_name_prefix="members")
        spec, warm = _trainer_spec(run, self._started), run.host.warm.acquire(run.work_dir)
        note_change = partial(self._note_change, recorder)
        self._process = process = trainer_process.TrainerProcess(
            spec,
            warm,
            on_step=self._note_step,
            on_waiting=self._say_waiting,
            on_changed=note_change,
            on_outlived=run.machines.outlive,
            detector=self._detector,
        )
        self._memory = MemoryWatch(process.pid)
        on_shutdown = run.host.shutdown.on_shutdown(self._pass_on_shutdown)
        with recorder, sampling(self._memory), watchdog.detecting_hangs(self._detector, self._kill_hung), on_shutdown:
            if run.group.nodes > 1:
                address = f"{run.group.host}:{process.wait_listening()}"
                run.machines.start_ranks(self._started.attempt, run.group.nodes, address, self._lose_machine)
            yield
        process.finish(run.config.checkpoint.grace_seconds)
        if run.host.warm.is_of_set:
            run.host.warm.start(run.work_dir)

    def segments(self, evaluations: run_decisions.AttemptEvaluations) -> Iterator[Segment]:
        """Yield what is to be trained next, until the run is complete, stops early, or this process has to leave.

        If the last segment got no checkpoint (an upload was under way, a rank is lost), the end adds one without steps.
        """
        assert self._process is not None
        run, steps, received = self._run, self._run.last_step, self._process.received
        with run.progress.doing("starting the trainer"):
            ready = self._process.wait_ready()
        if moved := describe_move(arithmetic_before(run.log.state, self._started.resumed_from), ready.arithmetic):
            run.say(f"  {moved}")
        step, before = ready.step, budgets.read_spent(run.log.state)
        self._ready_at = min(self._ready_at, time.monotonic())
        while step < steps and not self._is_ending() and self._gpu_seconds() < run.limit.device_seconds:
            until = segment_end(step, run.config.checkpoint, total_steps=steps, step_seconds=self._step_seconds())
            if evaluations.stop_run(until):
                return
            if self._is_too_dear(step, until, before):
                break
            decides = run.config.early_stop.is_on and evaluations.is_due(until)
            limit = stall_seconds(until, run.config.checkpoint, total_steps=steps, decides=decides)
            yield self._segment(step, until, limit)
            done = received.newest(trainer_protocol.SegmentDone)
            step = done.step if done else step
        while self._behind or (received.segments and self._process.is_dropped(step)):
            yield self._segment(step, step, None)

    def train(self, segment: Segment) -> trainer_protocol.SegmentDone:
        """Train a segment; raises `TrainerGone` if the process exits before."""
        assert self._process is not None
        make_room(self._run)
        done = self._process.train(segment.until, stall_seconds=segment.stall_seconds)
        self._is_stopped |= done.stopped  # a segment that only writes a checkpoint again is not stopped
        missing = f"no checkpoint of step {done.step}: that of step {done.behind} is still on its way"
        self._behind = "" if done.behind is None else missing
        if self._behind:
            self._run.say(f"  {missing}")
        return done

    def wait_staged(self, step: int) -> run_entries.StagedCheckpoint:
        """Wait until the checkpoint of `step` is staged; raises `CheckpointLost` if it never is, or `TrainerGone`."""
        assert self._process is not None
        with self._run.progress.doing(f"writing the checkpoint of step {step}"):
            return self._process.wait_staged(step)

    def explain(self, problem: TrainerGone | StorageError) -> Failure:
        """End the process if it still runs, and return what all evidence makes of its end."""
        return classify(self.evidence(problem))

    def evidence(self, problem: TrainerGone | StorageError | None) -> Evidence:
        """End the process if it still runs, and return all evidence about the attempt's end."""
        run, process, code, report = self._run, self._process, None, None
        end = run.log.state.finished if problem is None else None
        if process is not None:
            # A trainer that has ended gives its reason; one that still runs has nothing more to do.
            code = process.reap() if isinstance(problem, TrainerGone) else process.kill()
            report = process.received.newest(ExceptionReport)
        lost, memory = run.machines.end_attempt(), self._memory.reading() if self._memory else MemoryReading()
        last = process.received.newest(trainer_protocol.StepDone) if process else None
        return Evidence(
            exit_code=code,
            last_words=report,
            finished=end is not None,
            stopped_early=f"stopped early at step {end.step}: {end.stopped}" if end and end.stopped else "",
            stop_signal=run.host.shutdown.signal or ("SIGTERM" if self._is_stopped else None),
            notice=run.host.shutdown.detail,
            grace_ended=self._grace_ended,
            cancelling=run.cancellation.is_cancelling(),
            cancelled_in=run.cancellation.where,
            fenced=str(problem) if isinstance(problem, Fenced) else None,
            store_error=str(problem) if isinstance(problem, StorageError) else None,
            store_error_kind=kind_of(problem) if isinstance(problem, StorageError) else None,
            silent_seconds=self._gap.seconds if self._gap else None,
            allowed_seconds=self._gap.allowed_seconds if self._gap else None,
            lost_machine=lost.what if lost else self._unaffordable,
            lost_host=lost.host if lost else "",
            too_few_machines=run.too_few_machines,
            paused="" if problem else run.limit.why,
            too_dear="" if problem else self._too_dear,
            oom_kills=memory.oom_kills,
            rss_bytes=memory.rss_bytes,
            memory_limit_bytes=memory.limit_bytes,
            heartbeat_step=last.record.step if last else None,
            stderr_tail=() if process is None else process.stacks() if self._gap else process.stderr_tail(),
            injected=injected_faults.injected_faults(run.log.store, run.log.prefix, self._started),
        )

    def beating(self) -> AbstractContextManager[None]:
        """Write the attempt's heartbeat while the block runs."""
        log, every_seconds = self._run.log, self._run.config.lease.heartbeat_seconds
        return attempt_entries.writing_heartbeats(log.store, log.prefix, self.heartbeat, every_seconds=every_seconds)

    def heartbeat(self, beat: int) -> step_log.Heartbeat:
        """Return how far the attempt is and what it has used, a hanging trainer's silence as well."""
        silent_seconds = self._gap.seconds if self._gap else 0.0
        received = self._process.received if self._process else trainer_process.ReceivedEvents()
        last, ready = received.newest(trainer_protocol.StepDone), received.newest(trainer_protocol.Ready)
        return step_log.Heartbeat(
            attempt=self._started.attempt,
            beat=beat,
            step=last.record.step if last else self._started.first_step,
            train_loss=last.record.train_loss if last else None,
            tokens_per_second=last.record.tokens_per_second if last else None,
            tokens=last.tokens if last else 0,
            gpu_seconds=self._gpu_seconds() + silent_seconds * self._started.placement.devices,
            at=log_entry.utc_now(),
            peak=ready.peak if ready else None,
            arithmetic=ready.arithmetic if ready else None,
            starting_seconds=min(self._ready_at, time.monotonic()) - self._began,
            symptom=self._symptom or self._behind,
            claim_id=self._started.claim_id,
        )

    def _segment(self, first: int, until: int, stall: float | None) -> Segment:
        number, changed = self._started.attempt, self._started.changed
        return Segment(attempt=number, first=first, until=until, changed=changed, stall_seconds=stall)

    def _is_too_dear(self, step: int, until: int, before: budgets.Spent) -> bool:
        own = budgets.Spent(device_seconds=self._gpu_seconds(), steps=step - self._started.first_step)
        self._too_dear = budgets.limit_problem(self._run.config.cost, before + own, next_steps=until - step)
        return bool(self._too_dear)

    def _is_ending(self) -> bool:
        return self._run.is_shutting_down() or self._is_stopped

    def _newest_step(self) -> trainer_protocol.StepDone | None:
        return self._process.received.newest(trainer_protocol.StepDone) if self._process else None

    def _gpu_seconds(self) -> float:
        last = self._newest_step()
        return last.gpu_seconds if last else 0.0

    def _step_seconds(self) -> float | None:
        last = self._newest_step()
        tokens = self._run.config.training.global_batch * self._run.config.model.block_size
        return tokens / last.record.tokens_per_second if last else None

    def _say_waiting(self, waiting: trainer_protocol.Waiting) -> None:
        if waiting.why:
            self._run.sweep.start()  # the store may be full
            self._run.say(f"  step {waiting.step} has waited {waiting.seconds:.0f} s for the store: {waiting.why}")

    def _note_change(self, recorder: ThreadPoolExecutor, change: run_members.MembersChanged) -> None:
        with suppress(RuntimeError):  # the attempt is ending
            recorder.submit(self._record_change, change).add_done_callback(self._say_unrecorded)

    def _record_change(self, change: run_members.MembersChanged) -> None:
        run = self._run
        run.say(f"  {change.detail}")
        writer = run.writer(change.attempt)
        record = partial(attempt_entries.record_members, run.log, change, run.config.budgets, writer)
        if not run.retry.call(record) and self._process is not None:
            self._unaffordable = f"{change.detail.partition(';')[0]}, and budget lost is spent"
            run.say("  budget lost is spent: the attempt ends")
            self._process.kill()

    def _say_unrecorded(self, recorded: Future[None]) -> None:
        if error := recorded.exception():
            self._run.say(f"  that the ranks have changed is not on record: {error}")

    def _note_step(self, record: step_log.StepRecord) -> None:
        run = self._run
        run.progress.step(record)
        run.host.flow_run.wanted.set()
        before, self._symptom = self._symptom, run.throughput.add(record.tokens_per_second, record.seconds)
        if self._symptom and not before:
            place = self._started.placement
            crowded = f"; its {place.threads} threads wait for each other where others use the {place.cores} cores"
            run.say(f"  warning: {self._symptom}{crowded if place.threads > 1 else ''}")
        elif before and not self._symptom:
            run.say(f"  step {record.step}: back to {record.tokens_per_second:,.0f} tokens/s")

    def _pass_on_shutdown(self) -> None:
        process = self._process
        if process is None:
            return

        def end_grace() -> None:
            if process.is_alive:
                self._grace_ended = True
                process.kill()

        process.notify(signal.SIGTERM)
        _after(self._run.config.checkpoint.grace_seconds, end_grace)

    def _lose_machine(self, *, is_enough: bool) -> None:
        """End the trainer soon if the ranks cannot go on: they give a reason of their own before, if they have one."""
        process = self._process
        assert process is not None
        _after(_LOST_SECONDS if is_enough else 0.0, lambda: process.kill() if self._run.machines.lost() else None)

    def _kill_hung(self, gap: watchdog.HeartbeatGap) -> bool:
        if self._process is None or not self._process.is_alive:
            return False
        self._process.write_stacks()
        if self._run.group.size > 1 and self._process.end_hung_ranks():
            return True
        self._gap = gap
        self._process.kill()
        return False


def record_end(run: active_run.ActiveRun, evidence: Evidence, last: step_log.Heartbeat) -> run_entries.AttemptEnded:
    """Append the receipt of the attempt with this last heartbeat and return it; raises as `end_attempt` does."""
    if evidence.fenced is not None:
        raise Fenced(evidence.fenced)
    room = _room(run) if classify(evidence).reason is termination.TerminationReason.OOM else None
    over = AttemptOver(attempt=last.attempt, evidence=evidence, last=last, jitter=random.random(), room=room)
    return run.retry.call(
        end_attempt, run.log, over, limits=run.config.budgets, origin=run.origin, writer=run.writer(last.attempt)
    )


def _room(run: active_run.ActiveRun) -> MemoryRoom | None:
    """Return the memory that the next attempt has, now that the trainer is gone; None if it is not known."""
    if run.config.model.module:  # whose memory no formula knows
        return None
    try:
        vocab_size = read_manifest(run.log.store, run.origin.snapshot_id).vocab_size
    except StorageError:  # no reason to write no receipt
        return None
    return memory_room(run.config, vocab_size, available_memory(run.config.training, run.group))


def _workers(run: active_run.ActiveRun, started: run_entries.AttemptStarted) -> int:
    """Return how many micro-batches a trainer process computes at once; one where the run has been out of memory."""
    ends = (record.ended for record in run.log.state.attempts)
    on_device = started.placement.device != "cpu"  # whose free memory only a process with torch can tell
    if on_device or any(ended and ended.reason == termination.TerminationReason.OOM for ended in ends):
        return 1
    with suppress(StorageError):
        vocab_size = read_manifest(run.log.store, run.origin.snapshot_id).vocab_size
        memory = available_memory(run.config.training, run.group)
        return choose_workers(run.config, vocab_size, sizes_of(started), memory)
    return 1


def make_room(run: active_run.ActiveRun) -> None:
    """Sweep, and wait for that, where the store's disk has no room for two more checkpoints."""
    newest, free = run.log.state.newest_committed, free_bytes(run.log.store)
    if newest is not None and free is not None and free < 2 * newest.committed.bytes:
        run.sweep.finish()


def _trainer_spec(run: active_run.ActiveRun, started: run_entries.AttemptStarted) -> trainer_protocol.TrainerSpec:
    config, state = run.config, run.log.state
    return trainer_protocol.TrainerSpec(
        data=config.data,
        model=config.model,
        allowed_code=config.code.allow,
        training=config.training,
        divergence=config.divergence,
        run_id=run.log.run_id,
        attempt=started.attempt,
        claim_id=started.claim_id,
        store_url=run.log.store.url,
        snapshot_id=run.origin.snapshot_id,
        micro_batch=started.micro_batch,
        activation_checkpointing=started.activation_checkpointing,
        quarantined=tuple(sorted(state.quarantined_windows)),
        patience_seconds=config.checkpoint.patience_seconds,
        threads=started.placement.threads,
        workers=_workers(run, started),
        devices=started.placement.devices,
        resume=started.resumed_from,
        initial_weights_sha256=state.opened.initial_weights_sha256 if state.opened else None,
        before=trainer_protocol.trained_before(state.origin),
        cache_dir=run.origin.cache_dir,
        work_dir=run.work_dir,
        prompt=config.evaluation.prompts[0] if config.evaluation.prompts else "",
        faults=run.evaluation.faults,
    )


def _after(seconds: float, act: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
