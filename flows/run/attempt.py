"""One attempt from claim to receipt: the trainer's segments, with commits and evaluations of one overlapping the next.

Owns the order of things; what is noticed and what is decided is found out elsewhere. Holds no tensors.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prefect.futures import PrefectFuture

from flows.orchestrator.cancellation import CancellationWatch
from flows.orchestrator.run_artifacts import RunArtifacts
from flows.run.background_sweep import BackgroundSweep
from flows.run.early_stopping import EarlyStopping
from flows.run.progress import Progress
from flows.run.trainer_observation import TrainerObservation
from storage.errors import Fenced, StorageError
from storage.logs.heartbeat import Heartbeat
from storage.logs.log_entry import Writer
from storage.logs.run_entries import AttemptEnded, AttemptStarted, CheckpointReference, RunFinished
from storage.logs.run_log import RunLog
from tasks.attempt.attempt_end import AttemptOver, end_attempt
from tasks.attempt.attempt_receipt import Usage
from tasks.attempt.failure_remedy import DataOrigin
from tasks.attempt.heartbeat_writer import beating
from tasks.attempt.shutdown_signal import ShutdownSignal
from tasks.attempt.store_retry import StoreRetry
from tasks.commit_checkpoint import commit_checkpoint
from tasks.configuration.run_configuration import RunConfig
from tasks.errors import TrainerGone
from tasks.evaluate import evaluate, task_name
from tasks.evaluator.evaluation_run import EvaluationPlan
from tasks.policy.failures import Evidence, classify
from tasks.policy.segment_end import segment_end
from tasks.train_segment import train_segment
from tasks.trainer.trainer_group import TrainerGroup
from tasks.trainer.trainer_process import TrainerProcess
from tasks.trainer.trainer_protocol import SegmentDone, TrainerSpec, Waiting
from tasks.trainer.warm_trainer import WarmTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptPlan:
    """What every attempt of a run shares."""

    config: RunConfig
    evaluation: EvaluationPlan
    origin: DataOrigin
    store_retry: StoreRetry
    work_dir: Path
    threads: int
    group: TrainerGroup
    faults: str
    flow_run_id: str | None
    trainer: WarmTrainer


class Attempt:
    """A claimed attempt while it runs."""

    def __init__(
        self,
        log: RunLog,
        started: AttemptStarted,
        plan: AttemptPlan,
        *,
        notice: ShutdownSignal,
        progress: Progress,
        sweep: BackgroundSweep,
        artifacts: RunArtifacts,
        cancellation: CancellationWatch,
    ) -> None:
        """Prepare to run `started`; no process is started yet."""
        self._log, self._started, self._plan = log, started, plan
        self._notice, self._progress, self._sweep, self._artifacts = notice, progress, sweep, artifacts
        self._writer: Writer = _writer(started, plan)
        self._store_retry = plan.store_retry
        self._trainer: TrainerProcess | None = None
        self._commits: list[PrefectFuture[CheckpointReference]] = []
        self._evaluations: list[PrefectFuture[Any]] = []
        self._has_ended = False
        self._earlier_evaluations: list[PrefectFuture[Any]] = []
        self._early_stopping = EarlyStopping(log, plan.evaluation, notice, progress.say)
        self._stopped_child = False
        self._observation = TrainerObservation(plan.config, notice, cancellation)

    def run(self) -> AttemptEnded:
        """Train to the end or until something ends it, and append the receipt; returns it.

        Raises `Fenced` or `AppendUnknown` when not even the receipt could be written.
        """
        with beating(
            self._log.store,
            self._log.prefix,
            self._heartbeat,
            every_seconds=self._plan.config.lease.heartbeat_seconds,
        ):
            evidence = self._train()
        try:
            return self._end(evidence)
        finally:
            self._has_ended = True

    def wait_evaluations(self) -> None:
        """Wait for every evaluation this attempt submitted; their failures are in the log already."""
        for future in self._evaluations:
            future.wait()

    def _must_leave(self) -> bool:
        """Whether evaluators are given up: none keeps a process that was told to go and has written its receipt."""
        return self._has_ended and self._notice.signal is not None

    def _train(self) -> Evidence:
        problem: BaseException | None = None
        try:
            self._submit_missing_evaluations()
            if self._first_step < self._plan.config.training.steps and not self._is_over(self._evaluations):
                self._trainer = TrainerProcess(
                    self._order(),
                    self._plan.trainer.take(self._plan.work_dir),
                    on_step=self._progress.step,
                    on_waiting=self._say_waiting,
                    watch=self._observation.watch,
                )
                with self._observation.observing(self._trainer):
                    self._train_segments(self._trainer)
            self._store_retry.call(self._finish_run)
        except (TrainerGone, StorageError) as error:
            problem = error
        return self._evidence(problem)

    def _train_segments(self, trainer: TrainerProcess) -> None:
        step, steps, rules = trainer.wait_ready().step, self._plan.config.training.steps, self._plan.config.checkpoint
        while step < steps and self._notice.signal is None and not self._stopped_child:
            until = segment_end(step, rules, total_steps=steps, step_seconds=self._step_seconds(trainer))
            if self._is_over(self._evaluations if until == steps else self._earlier_evaluations):
                break
            segment = self._train_segment(trainer, step, until)
            self._wait_commits()
            if segment.step > step:
                self._submit(trainer, segment)
            step, self._stopped_child = segment.step, segment.stopped
        self._wait_commits()

    def _step_seconds(self, trainer: TrainerProcess) -> float | None:
        last, config = trainer.last_step, self._plan.config
        return config.training.global_batch * config.model.block_size / last.record.tokens_per_second if last else None

    def _is_over(self, awaited: Sequence[PrefectFuture[Any]]) -> bool:
        return self._store_retry.call(lambda: self._early_stopping.is_over(awaited))

    def _train_segment(self, trainer: TrainerProcess, first: int, until: int) -> SegmentDone:
        before, changed = len(trainer.segments), self._started.changed
        train_segment(
            trainer,
            attempt=self._started.attempt,
            first=first,
            until=until,
            note=f" ({changed})" if changed else "",
            explain=lambda: classify(self._evidence(TrainerGone())),
            return_state=True,
        )
        if len(trainer.segments) == before:
            raise TrainerGone(f"attempt {self._started.attempt}: the trainer ended between {first} and {until}")
        return trainer.segments[-1]

    def _submit(self, trainer: TrainerProcess, segment: SegmentDone) -> None:
        is_last = segment.step == self._plan.config.training.steps
        is_evaluated = is_last or self._early_stopping.is_due(segment.step)
        number, plan = self._started.attempt, self._plan.evaluation
        commit = commit_checkpoint.submit(
            trainer,
            self._log,
            self._writer,
            segment,
            attempt=number,
            step=segment.step,
            retry=self._store_retry,
            evaluation=plan if is_evaluated else None,
        )
        self._commits.append(commit)
        self._earlier_evaluations = list(self._evaluations)
        if is_evaluated:
            for one in plan.all:
                self._submit_evaluation(one, commit.result, segment.step)

    def _submit_missing_evaluations(self) -> None:
        """Measure what died with those who were to measure it."""
        for plan, reference in self._early_stopping.missing():
            self._submit_evaluation(plan, partial(_same, reference), reference.step)

    def _submit_evaluation(self, plan: EvaluationPlan, committed: Callable[[], CheckpointReference], step: int) -> None:
        before = self._evaluations[-1:]  # one evaluator at a time: they share the machine with training
        named = evaluate.with_options(task_run_name=task_name(step, plan))
        self._evaluations.append(
            # Prefect's stubs know `wait_for` only where they know no other parameter.
            named.submit(  # type: ignore[call-overload]
                self._log,
                committed,
                plan,
                step=step,
                during_attempt=self._started.attempt,
                stopping=self._must_leave,
                wait_for=before,
            )
        )

    def _wait_commits(self) -> None:
        for future in self._commits:
            reference = future.result()
            self._progress.say(f"  committed step {reference.step}: {reference.prefix}")
            self._artifacts.change()
            self._sweep.submit(f"after step {reference.step}")
        self._commits.clear()

    def _finish_run(self) -> None:
        if self._early_stopping.finish(self._started.attempt, self._writer):
            return
        state = self._log.refresh()
        newest = state.newest_committed
        if newest is None or newest.committed.step < self._plan.config.training.steps or state.finished is not None:
            return
        body = RunFinished(
            attempt=self._started.attempt,
            step=newest.committed.step,
            manifest_sha256=newest.committed.manifest_sha256,
            state_sha256=newest.committed.state_sha256,
        )
        self._log.append(lambda state: body, writer=self._writer)

    def _evidence(self, problem: BaseException | None) -> Evidence:
        end = self._log.state.finished if problem is None else None
        evidence = self._observation.evidence(problem, finished=end is not None, stopped=self._stopped_child)
        if end is None or not end.stopped:
            return evidence
        return replace(evidence, stopped_early=f"stopped early at step {end.step}: {end.stopped}")

    def _end(self, evidence: Evidence) -> AttemptEnded:
        if evidence.fenced is not None:
            raise Fenced(evidence.fenced)
        last, plan = self._trainer.last_step if self._trainer else None, self._plan
        usage = Usage(
            last_step=last.record.step if last else self._first_step,
            tokens=last.tokens if last else 0,
            gpu_seconds=last.gpu_seconds if last else 0.0,
        )
        over = AttemptOver(attempt=self._started.attempt, evidence=evidence, usage=usage, jitter=random.random())
        budgets, writer = plan.config.budgets, self._writer
        return self._store_retry.call(
            lambda: end_attempt(self._log, over, budgets=budgets, origin=plan.origin, writer=writer)
        )

    def _say_waiting(self, waiting: Waiting) -> None:
        if waiting.why:
            self._progress.say(f"  step {waiting.step} has waited {waiting.seconds:.0f} s for the store: {waiting.why}")

    def _heartbeat(self, beat: int) -> Heartbeat:
        last = self._trainer.last_step if self._trainer else None
        return Heartbeat(
            attempt=self._started.attempt,
            beat=beat,
            step=last.record.step if last else self._first_step,
            train_loss=last.record.train_loss if last else None,
            tokens=last.tokens if last else 0,
            gpu_seconds=last.gpu_seconds if last else 0.0,
        )

    def _order(self) -> TrainerSpec:
        plan = self._plan
        return TrainerSpec(
            run_id=self._log.run_id,
            attempt=self._started.attempt,
            store_url=self._log.store.url,
            snapshot_id=plan.evaluation.snapshot_id,
            data=plan.config.data,
            model=plan.config.model,
            training=plan.config.training,
            micro_batch=self._started.micro_batch,
            activation_checkpointing=self._started.activation_checkpointing,
            quarantined=tuple(sorted(self._log.state.quarantined_windows)),
            divergence=plan.config.divergence,
            patience_seconds=plan.config.checkpoint.patience_seconds,
            threads=plan.threads,
            processes=plan.group.processes,
            nodes=plan.group.nodes,
            rendezvous=plan.group.rendezvous,
            resume=self._started.resumed_from,
            initial_weights_sha256=self._log.state.opened.initial_weights_sha256 if self._log.state.opened else None,
            cache_dir=plan.origin.cache_dir,
            work_dir=plan.work_dir,
            prompt=plan.config.evaluation.prompts[0] if plan.config.evaluation.prompts else "",
            faults=plan.faults,
        )

    @property
    def _first_step(self) -> int:
        return self._started.first_step


def _writer(started: AttemptStarted, plan: AttemptPlan) -> Writer:
    return Writer(
        host=started.placement.host,
        pid=started.placement.pid,
        attempt=started.attempt,
        flow_run_id=plan.flow_run_id,
    )


def _same(reference: CheckpointReference) -> CheckpointReference:
    return reference
