"""The flow `train-gpt`: open or continue a run, attempt until it is finished or a budget says no, promote the best.

Owns what happens in which order. Every start continues from the newest committed checkpoint; nothing is kept here that
the log does not know.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed

from flows.operations.evaluation_planning import plan_evaluation
from flows.operations.promotion_use import rules_of
from flows.orchestrator.cancellation import CancellationWatch
from flows.orchestrator.ephemeral_server import is_ephemeral_server
from flows.orchestrator.named_failure_state import is_deployed, named_failure_state
from flows.orchestrator.run_artifacts import RunArtifacts
from flows.orchestrator.run_parameters import (
    ConfigParameter,
    OverridesParameter,
    RunIdParameter,
    StartOverParameter,
    StoreParameter,
)
from flows.preparation.memory_check import MemoryThere, choose_micro_batch, memory_there
from flows.preparation.preflight import TrainingRequest, check_before_start, named_run, wanted_configuration
from flows.preparation.training_store import training_store
from flows.run.attempt import Attempt, AttemptPlan
from flows.run.background_sweep import BackgroundSweep
from flows.run.progress import Progress
from flows.run.run_opening import open_run
from flows.run.run_promotion import FinishedRun, best_candidate, offer_best
from reports.exporters.exporters import exporting
from storage.errors import Fenced
from storage.logs.entry_log import this_writer
from storage.logs.run_entries import AttemptEnded, AttemptStarted, CheckpointReference, RunOpened
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.snapshots.data_snapshot import read_manifest
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store
from tasks.attempt.attempt_claim import Claimant, claim_attempt
from tasks.attempt.failure_remedy import DataOrigin
from tasks.attempt.preemption_notice import announced, notice_sources
from tasks.attempt.shutdown_signal import ShutdownSignal
from tasks.attempt.store_retry import StoreRetry, run_retry_policy
from tasks.configuration.configuration_source import configuration_folder
from tasks.configuration.run_configuration import RunConfig, check_drift
from tasks.errors import CheckpointGone, EvaluationInterrupted
from tasks.evaluate import evaluate, task_name
from tasks.evaluator.evaluation_run import EvaluationPlan
from tasks.machine.code_version import code_version
from tasks.machine.kubernetes_reason import kubernetes_reason
from tasks.machine.placement import this_placement, usable_cores
from tasks.machine.work_folder import trainer_folder, work_folder
from tasks.policy.attempt_sizes import next_sizes
from tasks.policy.promotion import PromotionRules, evaluations_of
from tasks.policy.termination import RESTARTABLE, DecisionAction, FlowState, final_state
from tasks.trainer.trainer_group import trainer_group
from tasks.trainer.warm_trainer import WarmTrainer, warm_trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    log: RunLog
    config: RunConfig
    plan: AttemptPlan
    notice: ShutdownSignal
    progress: Progress
    sweep: BackgroundSweep
    artifacts: RunArtifacts
    cancellation: CancellationWatch
    start_over: bool
    micro_batch: int | None


@flow(name="train-gpt", retries=0, validate_parameters=True, persist_result=False)
@named_failure_state
def train_gpt(
    config: ConfigParameter = "",
    run_id: RunIdParameter = "",
    overrides: OverridesParameter = (),
    store: StoreParameter = "",
    start_over: StartOverParameter = False,
) -> State[None]:
    """Train a run to its end, or continue it.

    Args:
        config: run configuration (TOML): a name in deployments/, a path or a URL; may be empty for a run that exists.
        run_id: name of the run; the same name continues the same run. Empty: the configuration file's name.
        overrides: `section.key=value` on top of the configuration, one each.
        store: folder or URL of the object store; empty: CAIRN_STORE, else the configuration's, else ./cairn-store.
        start_over: begin again at step 0 where commits exist and none can be read any more.
    """
    notice = ShutdownSignal()
    with notice.heard(), warm_trainer() as trainer:
        request = TrainingRequest(config=config, run_id=run_id, overrides=overrides, start_over=start_over)
        opened_store = open_store(training_store(store, request, os.environ))
        if is_deployed():  # the command has done so before it started the flow
            check_before_start(opened_store, request, os.environ)
        run = _open_run(opened_store, request, notice, trainer)
        rules = run.config.preemption
        sources = notice_sources(rules, os.environ)
        with (
            run.progress.shown(),
            run.artifacts.published(),
            exporting(run.log, run.config.mirrors, os.environ, run.progress.say),
            run.cancellation.watching(),
            notice.heard(rules.signal),
            announced(notice, sources, poll_seconds=rules.poll_seconds, on_problem=run.progress.say),
        ):
            return _train(run)


def _train(run: _Run) -> State[None]:
    while run.log.refresh().finished is None or run.log.state.open_attempt is not None:
        started = run.plan.store_retry.call(lambda: claim_attempt(run.log, _claimant(run), partial(_claim, run)))
        run.progress.say(_opening(started, run.config.training.steps))
        run.artifacts.change()
        attempt = Attempt(
            run.log,
            started,
            run.plan,
            notice=run.notice,
            progress=run.progress,
            sweep=run.sweep,
            artifacts=run.artifacts,
            cancellation=run.cancellation,
        )
        try:
            ended = attempt.run()
        except Fenced as fenced:
            run.progress.say(f"fenced: {fenced}")
            return Failed(name=FlowState.FENCED, message=str(fenced))
        finally:
            if run.notice.signal is None:
                attempt.wait_evaluations()
        run.artifacts.change()
        run.progress.say(f"attempt {ended.attempt} ended: {ended.reason} at step {ended.last_step}: {ended.detail}")
        if stopped := _stopped(run, ended):
            return stopped
        if ended.decision.action != DecisionAction.FINISH:
            run.plan.trainer.wait_out(ended.decision.delay_seconds, run.plan.work_dir)
    end = _promote_best(run)
    run.sweep.finish()
    return end


def _stopped(run: _Run, ended: AttemptEnded) -> State[None] | None:
    if ended.decision.action == DecisionAction.FINISH:
        return None
    if run.cancellation.is_cancelling():
        return Cancelled(message=f"{ended.detail}; the same command continues")
    name = final_state(ended.reason, ended.decision.action)
    if name is None:
        run.progress.say(f"  {ended.decision.reason}; left: {ended.decision.left}")
        return None
    follows = "the same command continues" if ended.reason in RESTARTABLE else ended.decision.reason
    return Failed(name=name, message=f"{ended.detail}; {follows}")


def _open_run(store: ObjectStore, request: TrainingRequest, notice: ShutdownSignal, trainer: WarmTrainer) -> _Run:
    run_id, base_dir = named_run(request), configuration_folder(request.config)
    log = RunLog(store, run_id)
    opened = log.refresh().opened
    wanted = wanted_configuration(request, log.state, os.environ)
    there = _memory_to_choose_by(wanted, log.state)  # before a trainer that waits takes its share
    if log.state.finished is None:
        trainer.begin(trainer_folder(os.environ, run_id))
    if opened is None:
        opened = open_run(log, wanted, base_dir)
        wanted = wanted.as_opened(opened.config)  # by whoever was first, perhaps on another machine
    check_drift(opened.config, wanted, run_id=run_id)
    # A worker shows nobody what its processes print: the same words are the flow run's log.
    progress = Progress(wanted.training.steps, echo=get_run_logger().info)
    plan = _plan(log, opened, wanted, base_dir, progress, trainer)
    return _Run(
        log=log,
        config=wanted,
        plan=plan,
        notice=notice,
        progress=progress,
        sweep=BackgroundSweep(store, run_id, wanted.checkpoint, plan.evaluation.suite.sha256),
        artifacts=RunArtifacts(log, plan.flow_run_id),
        cancellation=CancellationWatch(None if is_ephemeral_server(os.environ) else plan.flow_run_id, notice),
        start_over=request.start_over,
        micro_batch=None if there is None else _micro_batch(store, opened, wanted, there),
    )


def _memory_to_choose_by(config: RunConfig, state: RunState) -> MemoryThere | None:
    """Return what a micro-batch is to be chosen by; None where it is said, or was chosen by an earlier attempt."""
    if config.training.micro_batch != "auto" or state.attempts:
        return None
    return memory_there(config.training, trainer_group(config.training, os.environ))


def _micro_batch(store: ObjectStore, opened: RunOpened, config: RunConfig, there: MemoryThere) -> int:
    return choose_micro_batch(config, read_manifest(store, opened.data_snapshot).vocab_size, there)


def _plan(
    log: RunLog, opened: RunOpened, config: RunConfig, base_dir: Path, progress: Progress, trainer: WarmTrainer
) -> AttemptPlan:
    folder, faults = work_folder(os.environ), os.environ.get("CAIRN_FAULTS", "")
    threads, group = config.training.threads or usable_cores(), trainer_group(config.training, os.environ)
    trainer.use(group.command())
    return AttemptPlan(
        config=config,
        # It runs beside training, which goes first.
        evaluation=plan_evaluation(config, opened.data_snapshot, folder, threads=max(1, threads // 2), faults=faults),
        origin=DataOrigin(
            snapshot_id=opened.data_snapshot,
            data=config.data,
            base_dir=base_dir,
            cache_dir=folder / "snapshots",
        ),
        store_retry=StoreRetry(policy=run_retry_policy(config.checkpoint.patience_seconds), say=progress.say),
        work_dir=trainer_folder(os.environ, log.run_id),
        trainer=trainer,
        threads=threads,
        group=group,
        faults=faults,
        flow_run_id=flow_run.get_id(),
    )


def _claimant(run: _Run) -> Claimant:
    writer = replace(this_writer(), flow_run_id=run.plan.flow_run_id)
    return Claimant(
        lease=run.config.lease,
        budgets=run.config.budgets,
        writer=writer,
        monotonic=time.monotonic,
        sleep=time.sleep,
        start_over=run.start_over,
        kubernetes_reason=kubernetes_reason(os.environ),
    )


def _claim(run: _Run, number: int, reference: CheckpointReference | None, state: RunState) -> AttemptStarted:
    ends = [attempt.ended for attempt in state.attempts if attempt.ended is not None]
    sizes = next_sizes(state, run.config.training, chosen=run.micro_batch)
    return AttemptStarted(
        attempt=number,
        placement=this_placement(
            device=run.config.training.device, threads=run.plan.threads, world_size=run.plan.group.size
        ),
        config=run.config.document(),
        config_sha256=run.config.frozen_sha256(),
        code_version=code_version(),
        flow_run_id=run.plan.flow_run_id,
        # No process has more rows than its share: halving a micro-batch beyond it would change nothing.
        micro_batch=min(sizes.micro_batch, run.plan.group.rows(run.config.training.global_batch)),
        resumed_from=reference,
        activation_checkpointing=sizes.activation_checkpointing,
        quarantined_samples=len(state.quarantined_windows),
        changed=_changed(ends[-1]) if ends else "",
    )


def _changed(before: AttemptEnded) -> str:
    """What this attempt does differently and why, for people."""
    return f"after {before.reason}: {before.decision.changed}" if before.decision.changed else f"after {before.reason}"


def _measure_what_is_offered(run: _Run, rules: PromotionRules) -> None:
    """Put the evaluations on record that promotion asks for: of the last checkpoint, then of the best one."""
    state = run.log.refresh()
    finished = state.finished.manifest_sha256 if state.finished else None
    last = next((r for r in state.readable if r.committed.manifest_sha256 == finished), state.newest_committed)
    if last is not None:
        _measure(run, last.committed.reference, run.plan.evaluation.all)
    best = best_candidate(run.log.run_id, run.log.refresh(), rules)
    if best is not None and (last is None or best.reference != last.committed.reference):
        required = {suite.sha256 for suite in rules.required}
        with suppress(CheckpointGone):  # then another one is the best
            _measure(run, best.reference, [plan for plan in run.plan.evaluation.all if plan.suite.sha256 in required])


def _measure(run: _Run, reference: CheckpointReference, plans: Iterable[EvaluationPlan]) -> None:
    known = {item.suite_sha256 for item in evaluations_of(run.log.state, reference.manifest_sha256)}
    for plan in plans:
        if plan.suite.sha256 not in known:
            named = evaluate.with_options(task_run_name=task_name(reference.step, plan))
            named(run.log, lambda: reference, plan, step=reference.step, stopping=lambda: run.notice.signal is not None)


def _promote_best(run: _Run) -> State[None]:
    rules = rules_of(run.config)
    try:
        _measure_what_is_offered(run, rules)
    except EvaluationInterrupted as interrupted:
        return _left(run, f"trained; {interrupted}; the same command continues")
    offered = offer_best(
        FinishedRun(
            log=run.log,
            promotion=run.config.promotion,
            rules=rules,
            flow_run_id=run.plan.flow_run_id,
            notice=run.notice,
            say=run.progress.say,
        )
    )
    return _left(run, offered.message) if offered.is_interrupted else Completed(message=offered.message)


def _left(run: _Run, message: str) -> State[None]:
    if run.cancellation.is_cancelling():
        return Cancelled(message=message)
    return Failed(name=FlowState.INTERRUPTED if run.notice.signal == "SIGINT" else FlowState.PREEMPTED, message=message)


def _opening(started: AttemptStarted, steps: int) -> str:
    origin = f"resumes from step {started.resumed_from.step}" if started.resumed_from else "starts at step 0"
    return f"attempt {started.attempt} {origin} of {steps}"
