"""One attempt from claim to receipt: segments of training, each overlapping the commit and evaluation of the last."""

import math
import os
import random
import time
from dataclasses import replace
from functools import partial

from prefect.futures import PrefectFuture

from flows.preparation.memory_check import available_memory, memory_room
from flows.run.active_run import ActiveRun
from flows.run.attempt_evaluations import AttemptEvaluations
from flows.run.trainer_observation import TrainerObservation
from storage.errors import Fenced, StorageError
from storage.logs.entry_log import this_writer, utc_now
from storage.logs.heartbeat import Heartbeat
from storage.logs.log_entry import CheckpointReference, Writer
from storage.logs.run_entries import AttemptEnded, AttemptStarted, DevicePeak, Placement, RunFinished
from storage.logs.run_state import RunState
from storage.logs.step_log import StepRecord
from storage.snapshots.data_snapshot import read_manifest
from tasks.attempt.attempt_claim import Claimant, claim_attempt, writing_heartbeats
from tasks.attempt.attempt_end import end_attempt
from tasks.attempt.attempt_receipt import AttemptOver, Usage
from tasks.attempt.practised_faults import practised_faults
from tasks.attempt.preemption_notice import kubernetes_reason
from tasks.commit_checkpoint import commit_checkpoint
from tasks.errors import TrainerGone
from tasks.machine.machine_speed import device_name, trains_on_cuda
from tasks.machine.placement import code_version, library_versions, resolved_device, this_placement, usable_cores
from tasks.policy.attempt_sizes import next_sizes, segment_end
from tasks.policy.failures import Evidence, classify
from tasks.policy.memory_remedy import MemoryRoom
from tasks.policy.termination import TerminationReason
from tasks.train_segment import train_segment
from tasks.trainer.trainer_process import TrainerProcess
from tasks.trainer.trainer_protocol import SegmentDone, TrainerSpec, Waiting


def claim_next_attempt(run: ActiveRun) -> AttemptStarted:
    """Append attempt-started and return it; raises as `claim_attempt` does."""
    claimant = Claimant(
        lease=run.config.lease,
        budgets=run.config.budgets,
        writer=replace(this_writer(), flow_run_id=run.flow_run_id),
        monotonic=time.monotonic,
        sleep=time.sleep,
        start_over=run.start_over,
        kubernetes_reason=kubernetes_reason(os.environ),
    )
    return run.retry.call(lambda: claim_attempt(run.log, claimant, partial(_claim, run)))


class Attempt:
    """A claimed attempt while it runs."""

    def __init__(self, run: ActiveRun, started: AttemptStarted) -> None:
        """Prepare to run `started`; no process is started yet."""
        self._run, self._started = run, started
        self._writer = Writer(
            host=started.placement.host, pid=started.placement.pid, attempt=started.attempt, flow_run_id=run.flow_run_id
        )
        self.evaluations = AttemptEvaluations(run, started.attempt)
        self._observation = TrainerObservation(run.config, run.shutdown, run.cancellation)
        self._trainer: TrainerProcess | None = None
        self._symptom = ""
        self._began, self._ready_at = time.monotonic(), math.inf
        self._commits: list[PrefectFuture[CheckpointReference]] = []
        self._is_trainer_stopped = False

    def run(self) -> AttemptEnded:
        """Train to the end or until something ends it, and append the receipt; returns it.

        Raises `Fenced` or `AppendUnknown` when not even the receipt could be written.
        """
        log, every_seconds = self._run.log, self._run.config.lease.heartbeat_seconds
        with writing_heartbeats(log.store, log.prefix, self._heartbeat, every_seconds=every_seconds):
            evidence = self._train()
        try:
            return self._end(evidence)
        finally:
            self.evaluations.end_attempt()

    def _train(self) -> Evidence:
        trainers = self._run.trainers
        problem: BaseException | None = None
        try:
            self.evaluations.submit_missing()
            if self._started.first_step < self._run.config.training.steps and not self.evaluations.stop_run():
                self._trainer = TrainerProcess(
                    _trainer_spec(self._run, self._started),
                    trainers.warm.acquire(trainers.work_dir),
                    on_step=self._note_step,
                    on_waiting=self._say_waiting,
                    detector=self._observation.watch,
                )
                with self._observation.observing(self._trainer):
                    self._train_segments(self._trainer)
            self._run.retry.call(self._finish_run)
        except (TrainerGone, StorageError) as error:
            problem = error
        return self._evidence(problem)

    def _train_segments(self, trainer: TrainerProcess) -> None:
        step, config = trainer.wait_ready().step, self._run.config
        self._ready_at = time.monotonic()
        steps, shutdown = config.training.steps, self._run.shutdown
        while step < steps and shutdown.signal is None and not self._is_trainer_stopped:
            last, tokens = trainer.received.last_step, config.training.global_batch * config.model.block_size
            step_seconds = tokens / last.record.tokens_per_second if last else None
            until = segment_end(step, config.checkpoint, total_steps=steps, step_seconds=step_seconds)
            if self.evaluations.stop_run(until):
                break
            segment = self._train_segment(trainer, step, until)
            self._wait_commits()
            if segment.step > step:
                self._submit_commit(trainer, segment)
            step, self._is_trainer_stopped = segment.step, segment.stopped
        self._wait_commits()

    def _train_segment(self, trainer: TrainerProcess, first: int, until: int) -> SegmentDone:
        before, changed = len(trainer.received.segments), self._started.changed
        train_segment(
            trainer,
            attempt=self._started.attempt,
            first=first,
            until=until,
            note=f" ({changed})" if changed else "",
            explain=lambda: classify(self._evidence(TrainerGone())),
            return_state=True,
        )
        if len(trainer.received.segments) == before:
            raise TrainerGone(f"attempt {self._started.attempt}: the trainer ended between {first} and {until}")
        return trainer.received.segments[-1]

    def _submit_commit(self, trainer: TrainerProcess, segment: SegmentDone) -> None:
        commit = commit_checkpoint.submit(
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

    def _wait_commits(self) -> None:
        for future in self._commits:
            reference = future.result()
            self._run.say(f"  committed step {reference.step}: {reference.prefix}")
            self._run.overview.change()
            self._run.sweep.submit(f"after step {reference.step}")
        self._commits.clear()

    def _finish_run(self) -> None:
        if self.evaluations.finish_early(self._writer):
            return
        state = self._run.log.refresh()
        newest = state.newest_committed
        if newest is None or newest.committed.step < self._run.config.training.steps or state.finished is not None:
            return
        body = RunFinished(
            attempt=self._started.attempt,
            step=newest.committed.step,
            manifest_sha256=newest.committed.manifest_sha256,
            state_sha256=newest.committed.state_sha256,
        )
        self._run.log.append(lambda state: body, writer=self._writer)

    def _evidence(self, problem: BaseException | None) -> Evidence:
        end = self._run.log.state.finished if problem is None else None
        evidence = self._observation.evidence(problem, finished=end is not None, stopped=self._is_trainer_stopped)
        log = self._run.log
        evidence = replace(evidence, practised=practised_faults(log.store, log.prefix, self._started))
        if end is None or not end.stopped:
            return evidence
        return replace(evidence, stopped_early=f"stopped early at step {end.step}: {end.stopped}")

    def _end(self, evidence: Evidence) -> AttemptEnded:
        if evidence.fenced is not None:
            raise Fenced(evidence.fenced)
        run, last = self._run, self._trainer.received.last_step if self._trainer else None
        usage = Usage(
            last_step=last.record.step if last else self._started.first_step,
            tokens=last.tokens if last else 0,
            gpu_seconds=last.gpu_seconds if last else 0.0,
            peak=self._peak(),
            starting_seconds=self._starting_seconds(),
        )
        over = AttemptOver(
            attempt=self._started.attempt,
            evidence=evidence,
            usage=usage,
            jitter=random.random(),
            room=_room(run) if classify(evidence).reason is TerminationReason.OOM else None,
        )
        return run.retry.call(
            lambda: end_attempt(run.log, over, budgets=run.config.budgets, origin=run.origin, writer=self._writer)
        )

    def _say_waiting(self, waiting: Waiting) -> None:
        if waiting.why:
            self._run.say(f"  step {waiting.step} has waited {waiting.seconds:.0f} s for the store: {waiting.why}")

    def _note_step(self, record: StepRecord) -> None:
        self._run.progress.step(record)
        before, self._symptom = self._symptom, self._run.throughput.add(record.tokens_per_second, record.seconds)
        if self._symptom and not before:
            self._run.say(f"  warning: {self._symptom}{_crowded(self._started.placement)}")
        elif before and not self._symptom:
            self._run.say(f"  step {record.step}: back to {record.tokens_per_second:,.0f} tokens/s")

    def _peak(self) -> DevicePeak | None:
        ready = self._trainer.received.ready if self._trainer else None
        return ready.peak if ready else None

    def _starting_seconds(self) -> float:
        return min(self._ready_at, time.monotonic()) - self._began

    def _heartbeat(self, beat: int) -> Heartbeat:
        last = self._trainer.received.last_step if self._trainer else None
        return Heartbeat(
            attempt=self._started.attempt,
            beat=beat,
            step=last.record.step if last else self._started.first_step,
            train_loss=last.record.train_loss if last else None,
            tokens=last.tokens if last else 0,
            gpu_seconds=last.gpu_seconds if last else 0.0,
            at=utc_now(),
            peak=self._peak(),
            starting_seconds=self._starting_seconds(),
            symptom=self._symptom,
        )


def _crowded(placement: Placement) -> str:
    if placement.threads <= 1:
        return ""
    return f"; its {placement.threads} threads wait for each other where others use the {placement.cores} cores"


def _claim(run: ActiveRun, number: int, reference: CheckpointReference | None, state: RunState) -> AttemptStarted:
    ends = [attempt.ended for attempt in state.attempts if attempt.ended is not None]
    training, trainers = run.config.training, run.trainers
    sizes = next_sizes(state, training, processes=trainers.group.size, chosen=run.micro_batch)
    on_cuda, processes = trains_on_cuda(training.device), trainers.group.size
    device = resolved_device(training.device, on_cuda=on_cuda, processes=processes)
    return AttemptStarted(
        attempt=number,
        placement=replace(
            this_placement(device=device, threads=trainers.threads, world_size=processes),
            device_name=device_name(device),
            cores=usable_cores(),
            nodes=trainers.group.nodes,
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
        changed=_describe_change(ends[-1]) if ends else "",
    )


def _room(run: ActiveRun) -> MemoryRoom | None:
    """Return the memory that the next attempt has, now that the trainer is gone; None if nobody knows."""
    try:
        vocab_size = read_manifest(run.log.store, run.origin.snapshot_id).vocab_size
    except StorageError:  # no reason to write no receipt
        return None
    return memory_room(run.config, vocab_size, available_memory(run.config.training, run.trainers.group))


def _describe_change(before: AttemptEnded) -> str:
    return f"after {before.reason}: {before.decision.changed}" if before.decision.changed else f"after {before.reason}"


def _trainer_spec(run: ActiveRun, started: AttemptStarted) -> TrainerSpec:
    config, trainers, state = run.config, run.trainers, run.log.state
    return TrainerSpec(
        run_id=run.log.run_id,
        attempt=started.attempt,
        store_url=run.log.store.url,
        snapshot_id=run.origin.snapshot_id,
        data=config.data,
        model=config.model,
        training=config.training,
        micro_batch=started.micro_batch,
        activation_checkpointing=started.activation_checkpointing,
        quarantined=tuple(sorted(state.quarantined_windows)),
        divergence=config.divergence,
        patience_seconds=config.checkpoint.patience_seconds,
        threads=trainers.threads,
        processes=trainers.group.processes,
        nodes=trainers.group.nodes,
        rendezvous=trainers.group.rendezvous,
        resume=started.resumed_from,
        initial_weights_sha256=state.opened.initial_weights_sha256 if state.opened else None,
        cache_dir=run.origin.cache_dir,
        work_dir=trainers.work_dir,
        prompt=config.evaluation.prompts[0] if config.evaluation.prompts else "",
        faults=trainers.faults,
    )
