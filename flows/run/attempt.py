"""One attempt from claim to receipt: segments of training, each overlapping the commit and evaluation of the last."""

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from prefect.futures import PrefectFuture

from cairn.flows.orchestrator.run_overview import RunOverview
from cairn.flows.preparation.preflight import available_memory, memory_room
from cairn.flows.run import active_run, attempt_evaluations, trainer_observation
from cairn.storage.errors import Fenced, StorageError
from cairn.storage.logs import log_entry, run_entries, step_log
from cairn.storage.snapshots.data_snapshot import read_manifest
from cairn.storage.stores.document import project
from cairn.tasks.attempt.attempt_claim import writing_heartbeats
from cairn.tasks.attempt.attempt_end import AttemptOver, Usage, end_attempt
from cairn.tasks.attempt.injected_faults import injected_faults
from cairn.tasks.commit_checkpoint import commit_checkpoint
from cairn.tasks.errors import TrainerGone
from cairn.tasks.policy.attempt_sizes import MemoryRoom, segment_end, stall_seconds, stretch_end
from cairn.tasks.policy.failures import Evidence, classify
from cairn.tasks.policy.termination import TerminationReason
from cairn.tasks.train_segment import train_segment
from cairn.tasks.trainer.trainer_process import ReceivedEvents, TrainerProcess
from cairn.tasks.trainer.trainer_protocol import SegmentDone, TrainerSpec, Waiting

Commit = PrefectFuture[log_entry.CheckpointReference] | Future[log_entry.CheckpointReference]


class Attempt:
    """A claimed attempt while it runs; `is_taken` once a flow runs it."""

    def __init__(self, run: active_run.ActiveRun, started: run_entries.AttemptStarted) -> None:
        self._run, self._started = run, started
        self.is_taken = self._is_beating = False
        self._beating, self._observed = ExitStack(), ExitStack()
        self._writer = log_entry.Writer(
            host=started.placement.host, pid=started.placement.pid, attempt=started.attempt, flow_run_id=run.flow_run_id
        )
        self.evaluations = attempt_evaluations.AttemptEvaluations(run, started.attempt)
        self._observation = trainer_observation.TrainerObservation(run.config, run.shutdown, run.cancellation)
        self._trainer: TrainerProcess | None = None
        self._symptom = self._behind = ""
        self._began, self._ready_at = time.monotonic(), math.inf
        self._commits: list[Commit] = []
        beside: Any = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._submit_beside = partial(beside.submit, commit_checkpoint.fn)
        self._is_trainer_stopped = False
        self._problem: Exception | None = None

    def begin(self) -> None:
        """Write heartbeats and train the first segment, for a flow that comes later; returns after its first step."""
        self._beat()
        with suppress(TrainerGone):  # the flow finds out why
            trainer = self._start_trainer()
            step = trainer.wait_ready().step
            self._ready_at = time.monotonic()
            self._begin_segment(trainer, step)
            trainer.received.wait(lambda: trainer.received.last_step)

    def show_in(self, flow_run_id: str | None) -> active_run.ActiveRun:
        """Go on with what was begun in this flow run, which the log is told; returns the run."""
        log, number = self._run.log, self._started.attempt
        self._run = replace(self._run, flow_run_id=flow_run_id, overview=RunOverview(log, flow_run_id))
        self._writer = replace(self._writer, flow_run_id=flow_run_id)
        if flow_run_id is not None:
            shown = run_entries.AttemptShown(attempt=number, flow_run_id=flow_run_id)
            with suppress(StorageError):  # what follows meets the same store, and has patience
                log.append(lambda state: None if state.fences(number) else shown, writer=self._writer)
        return self._run

    def run(self) -> run_entries.AttemptEnded:
        """Train until something ends it; append and return the receipt. `Fenced` or `AppendUnknown` if that fails."""
        self.is_taken = True
        with self._beating:
            self._beat()
            evidence = self._evidence(None) if self._run.too_few_machines else self._train()
        try:
            return self._end(evidence)
        finally:
            self.evaluations.end_attempt()

    def give_up(self, name: str, detail: str) -> None:
        """End what was begun and no flow has taken, as a request to leave of this name does."""
        self._run.shutdown.request(name, detail)
        with self._beating, self._observed:
            evidence = self._evidence(None)
        with suppress(StorageError):  # else the next claim writes the receipt
            self._end(evidence)

    def _beat(self) -> None:
        log, every_seconds = self._run.log, self._run.config.lease.heartbeat_seconds
        if not self._is_beating:
            beats = writing_heartbeats(log.store, log.prefix, self._heartbeat, every_seconds=every_seconds)
            self._beating.enter_context(beats)
            self._is_beating = True

    def _start_trainer(self) -> TrainerProcess:
        run = self._run
        self._trainer = TrainerProcess(
            _trainer_spec(run, self._started),
            run.warm.acquire(run.work_dir),
            on_step=self._note_step,
            on_waiting=self._say_waiting,
            detector=self._observation.watch,
        )
        self._observed.enter_context(self._observation.observing(self._trainer))
        return self._trainer

    def _train(self) -> Evidence:
        run = self._run
        problem: BaseException | None = None
        try:
            self.evaluations.submit_missing()
            is_over = self._started.first_step >= run.config.training.steps or self.evaluations.stop_run()
            if self._trainer is not None or not is_over:
                self._trainer = self._trainer or self._start_trainer()
                with self._observed:
                    if run.group.nodes > 1:
                        address = f"{run.group.host}:{self._trainer.wait_listening()}"
                        lose = self._observation.lose_machine
                        run.machines.start_ranks(self._started.attempt, run.group.nodes, address, lose)
                    self._train_segments(self._trainer)
                self._trainer.finish(run.config.checkpoint.grace_seconds)
            run.retry.call(self._finish_run)
        except (TrainerGone, StorageError) as error:
            problem = error
        return self._evidence(problem)

    def _train_segments(self, trainer: TrainerProcess) -> None:
        step, steps = trainer.wait_ready().step, self._run.config.training.steps
        self._ready_at = min(self._ready_at, time.monotonic())
        while step < steps and (trainer.is_in_segment or not self._is_ending()):
            if self.evaluations.stop_run(self._segment_end(trainer, step)):
                break
            segment = self._train_stretch(trainer, step)
            self._is_trainer_stopped = segment.stopped
            if self._is_staged(segment):
                self._wait_commits()
                if segment.step > step:
                    self._commit(trainer, segment, commit_checkpoint.submit)
            step = segment.step
        if self._behind and self._is_ending():  # told to end between two segments, of which the last has no checkpoint
            trainer.begin_segment(step)
            segment = trainer.end_segment()
            self._wait_commits()
            self._commit(trainer, segment, commit_checkpoint.submit)
        self._wait_commits()

    def _is_staged(self, segment: SegmentDone) -> bool:
        missing = f"no checkpoint of step {segment.step}: that of step {segment.behind} is still on its way"
        self._behind = "" if segment.behind is None else missing
        if self._behind:
            self._run.say(f"  {missing}")
        return not self._behind

    def _begin_segment(self, trainer: TrainerProcess, step: int) -> None:
        until, config = self._segment_end(trainer, step), self._run.config
        decides = config.early_stop.is_on and self.evaluations.is_due(until)
        limit = stall_seconds(until, config.checkpoint, total_steps=config.training.steps, decides=decides)
        trainer.begin_segment(until, stall_seconds=limit)

    def _train_one(self, trainer: TrainerProcess, step: int) -> SegmentDone:
        self._begin_segment(trainer, step)
        return trainer.end_segment()

    def _is_ending(self) -> bool:
        return self._run.shutdown.signal is not None or self._is_trainer_stopped

    def _segment_end(self, trainer: TrainerProcess, step: int) -> int:
        config, seconds = self._run.config, self._step_seconds(trainer)
        return segment_end(step, config.checkpoint, total_steps=config.training.steps, step_seconds=seconds)

    def _step_seconds(self, trainer: TrainerProcess) -> float | None:
        last, config = trainer.received.last_step, self._run.config
        tokens = config.training.global_batch * config.model.block_size
        return tokens / last.record.tokens_per_second if last else None

    def _train_stretch(self, trainer: TrainerProcess, first: int) -> SegmentDone:
        """Train one segment, or several short ones, in one task run; returns the last, which is not committed yet."""
        config, changed = self._run.config, self._started.changed
        until = stretch_end(
            first,
            config.checkpoint,
            total_steps=config.training.steps,
            step_seconds=self._step_seconds(trainer),
            is_border=lambda until: config.early_stop.is_on or self.evaluations.is_due(until),
        )
        train_segment(
            partial(self._train_to, trainer, first, until),
            attempt=self._started.attempt,
            first=first,
            until=until,
            note=f" ({changed})" if changed else "",
            explain=lambda problem: classify(self._evidence(problem)),
            return_state=True,
        )
        if self._problem is not None:
            raise self._problem
        return trainer.received.segments[-1]

    def _train_to(self, trainer: TrainerProcess, first: int, until: int) -> SegmentDone:
        """Train to `until`, committing what is staged before it; a task run keeps its errors, so they are noted."""
        try:
            segment = self._train_one(trainer, first)
            while segment.step < until and not segment.stopped and not self._is_ending():
                if self._is_staged(segment):
                    self._wait_commits(sweeps=False)
                    self._commit(trainer, segment, self._submit_beside)
                segment = self._train_one(trainer, segment.step)
        except Exception as problem:
            self._problem = problem
            raise
        return segment

    def _commit(self, trainer: TrainerProcess, segment: SegmentDone, submit: Callable[..., Commit]) -> None:
        commit = submit(
            trainer,
            self._run.log,
            self._writer,
            segment,
            attempt=self._started.attempt,
            step=segment.step,
            retry=self._run.retry,
            evaluation=self._run.evaluation if self.evaluations.is_due(segment.step) else None,
        )
        self._commits.append(commit)
        self.evaluations.follow_commit(segment.step, commit.result)

    def _wait_commits(self, *, sweeps: bool = True) -> None:
        references = [future.result() for future in self._commits]
        for reference in references:
            self._run.say(f"  committed step {reference.step}: {reference.prefix}")
            self._run.overview.change()
        self._commits.clear()
        for reference in references if sweeps else ():
            self._run.sweep.submit(f"after step {reference.step}")

    def _finish_run(self) -> None:
        if self.evaluations.finish_early(self._writer):
            return
        state = self._run.log.refresh()
        newest = state.newest_committed
        if newest and newest.committed.step >= self._run.config.training.steps and state.finished is None:
            body = project(newest.committed, run_entries.RunFinished, attempt=self._started.attempt)
            self._run.log.append(lambda state: body, writer=self._writer)

    def _evidence(self, problem: BaseException | None) -> Evidence:
        end = self._run.log.state.finished if problem is None else None
        evidence = self._observation.evidence(problem, finished=end is not None, stopped=self._is_trainer_stopped)
        return replace(
            evidence,
            injected=injected_faults(self._run.log.store, self._run.log.prefix, self._started),
            too_few_machines=self._run.too_few_machines,
            stopped_early=f"stopped early at step {end.step}: {end.stopped}" if end and end.stopped else "",
        )

    def _end(self, evidence: Evidence) -> run_entries.AttemptEnded:
        if evidence.fenced is not None:
            raise Fenced(evidence.fenced)
        run, last = self._run, self._heartbeat(0)
        over = AttemptOver(
            attempt=self._started.attempt,
            evidence=evidence,
            usage=project(last, Usage, last_step=last.step),
            jitter=random.random(),
            room=_room(run) if classify(evidence).reason is TerminationReason.OOM else None,
        )
        return run.retry.call(
            lambda: end_attempt(run.log, over, budgets=run.config.budgets, origin=run.origin, writer=self._writer)
        )

    def _say_waiting(self, waiting: Waiting) -> None:
        if waiting.why:
            self._run.say(f"  step {waiting.step} has waited {waiting.seconds:.0f} s for the store: {waiting.why}")

    def _note_step(self, record: step_log.StepRecord) -> None:
        self._run.progress.step(record)
        before, self._symptom = self._symptom, self._run.throughput.add(record.tokens_per_second, record.seconds)
        if self._symptom and not before:
            place = self._started.placement
            crowded = f"; its {place.threads} threads wait for each other where others use the {place.cores} cores"
            self._run.say(f"  warning: {self._symptom}{crowded if place.threads > 1 else ''}")
        elif before and not self._symptom:
            self._run.say(f"  step {record.step}: back to {record.tokens_per_second:,.0f} tokens/s")

    def _heartbeat(self, beat: int) -> step_log.Heartbeat:
        received = self._trainer.received if self._trainer else ReceivedEvents()
        last, ready = received.last_step, received.ready
        return step_log.Heartbeat(
            attempt=self._started.attempt,
            beat=beat,
            step=last.record.step if last else self._started.first_step,
            train_loss=last.record.train_loss if last else None,
            tokens=last.tokens if last else 0,
            gpu_seconds=last.gpu_seconds if last else 0.0,
            at=log_entry.utc_now(),
            peak=ready.peak if ready else None,
            starting_seconds=min(self._ready_at, time.monotonic()) - self._began,
            symptom=self._symptom or self._behind,
        )


def _room(run: active_run.ActiveRun) -> MemoryRoom | None:
    """Return the memory that the next attempt has, now that the trainer is gone; None if nobody knows."""
    try:
        vocab_size = read_manifest(run.log.store, run.origin.snapshot_id).vocab_size
    except StorageError:  # no reason to write no receipt
        return None
    return memory_room(run.config, vocab_size, available_memory(run.config.training, run.group))


def _trainer_spec(run: active_run.ActiveRun, started: run_entries.AttemptStarted) -> TrainerSpec:
    config, state = run.config, run.log.state
    return project(
        config,
        TrainerSpec,
        run_id=run.log.run_id,
        attempt=started.attempt,
        store_url=run.log.store.url,
        snapshot_id=run.origin.snapshot_id,
        micro_batch=started.micro_batch,
        activation_checkpointing=started.activation_checkpointing,
        quarantined=tuple(sorted(state.quarantined_windows)),
        patience_seconds=config.checkpoint.patience_seconds,
        threads=run.threads,
        resume=started.resumed_from,
        initial_weights_sha256=state.opened.initial_weights_sha256 if state.opened else None,
        cache_dir=run.origin.cache_dir,
        work_dir=run.work_dir,
        prompt=config.evaluation.prompts[0] if config.evaluation.prompts else "",
        faults=run.evaluation.faults,
    )
