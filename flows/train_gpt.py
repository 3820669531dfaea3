"""The main job, top to bottom: tokenize and split; train, commit, evaluate until the end; decide; promote.

The chain is written once. The executor of its steps is a parameter: the plain functions, tasks of Prefect in a deployed
flow run, or the plain functions beside a witness that shows them. Prefect shows; the run log decides.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from dataclasses import replace
from typing import Any
from uuid import uuid4

from prefect import Task, flow, get_run_logger, runtime

from cairn.flows.orchestrator import deployments, flow_run, flow_run_tags, server_setup
from cairn.flows.preparation.training_request import ResolvedRequest, TrainingRequest, choose_run_id, with_settings
from cairn.flows.run import active_run, attempt_trainer, node_service, run_decisions, run_start
from cairn.flows.run.run_decisions import AttemptEvaluations, finish_run
from cairn.flows.run.steps import PLAIN, Chain, Steps, name_of, state_of, steps_by
from cairn.flows.watching.deployed_continuation import begin_request, name_successor
from cairn.storage.errors import AppendUnknown, Fenced, StorageError, StoreUnavailable
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_entries import AttemptEnded, AttemptStarted
from cairn.tasks import commit_checkpoint, train_segment
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.configuration.addresses import name_store
from cairn.tasks.errors import CheckpointLost, LiveOwner, ShutdownRequested, TrainerGone
from cairn.tasks.policy.termination import EXIT_CODES, FlowEnd, FlowOutcome
from cairn.tasks.trainer.trainer_process import WarmTrainer

_GROUPS = 17
"""Of a long run every n-th segment is shown, with its commit and evaluation: at most `MOST_TASK_RUNS` a flow run."""


@flow(name="train-gpt", retries=0, validate_parameters=True, persist_result=False)
@flow_run.as_prefect_state
def train_gpt(
    config: deployments.Config = "",
    run_id: deployments.RunId = "",
    steps: deployments.Steps = 0,
    learning_rate: deployments.LearningRate = 0.0,
    micro_batch: deployments.MicroBatch = 0,
    store: deployments.Store = "",
    store_credentials: deployments.Credentials = "",
    overrides: deployments.Overrides = (),
    start_over: deployments.StartOver = False,
) -> FlowEnd:
    """Train a run to its end, or continue it.

    Args:
        config: run configuration (TOML): a name in deployments/ such as quickstart, a path, or a URL such as
            s3://bucket/runs/bard.toml; may be empty for a run that exists.
        run_id: name of the run, such as bard-1; the same name continues it. Empty: the configuration file's name.
        steps: training.steps; 0: as the configuration says.
        learning_rate: training.lr; 0: as the configuration says.
        micro_batch: training.micro_batch; 0: as the configuration says.
        store: folder or URL of the object store, such as s3://bucket/cairn; empty: CAIRN_STORE, else the
            configuration's, else ./cairn-store.
        store_credentials: name of a block `Cairn store credentials`; empty: those of the worker.
        overrides: `section.key=value` on top of the configuration, one each; a key with a field above only there.
        start_over: begin again at step 0 where commits exist and none can be read any more.
    """
    run = choose_run_id(TrainingRequest(config=config, run_id=run_id))
    is_named = flow_run_tags.introduce(run, f"run:{run}")
    server_setup.take_credentials(store_credentials, os.environ)
    given = with_settings(overrides, steps=steps, learning_rate=learning_rate, micro_batch=micro_batch)
    request = TrainingRequest(config=config, run_id=run_id, overrides=given, store=store, start_over=start_over)
    shutdown, ours = ShutdownSignal(), runtime.flow_run
    resolved, configuration = begin_request(request, store_credentials, get_run_logger().warning)
    shown = flow_run.FlowRun(ours.get_id(), parameters=ours.get_parameters(), echo=get_run_logger().info)
    shown.keeps_name = is_named
    deployment = runtime.deployment.get_name()
    by = f"prefect deployment {ours.get_flow_name()}/{deployment}" if deployment else "person"
    with shutdown.listening(configuration.preemption.signal), closing(WarmTrainer()) as warm:
        continued_by = run_start.starter(os.environ, default=by)
        host = active_run.Host(shutdown=shutdown, warm=warm, flow_run=shown, continued_by=continued_by)
        return train(resolved, steps_by(Chain().as_task), host)


def train(resolved: ResolvedRequest, steps: Steps, host: active_run.Host) -> FlowEnd:
    """Train a run to its end, or continue it; `steps` executes each step. Raises what refuses a run or its claim."""
    run, end = run_start.open_run(resolved, steps, host), None
    with run.running_services(), server_setup.accelerator_slot(run.say, is_stopping=run.is_shutting_down):
        try:
            while end is None and run.log.state.finished is None:
                node_service.gather_machines(run)
                started = run_start.claim_next_attempt(run)  # fences every older attempt
                ended = train_attempt(run, started, steps)  # the receipt: reason, charge, decision
                if (end := run_decisions.end_after(run, ended)) is None and run.log.state.finished is None:
                    run.wait(ended.decision.delay_seconds)
            if end is None:
                end = run_decisions.offer_best(run, steps)
                end = run.finish_sweep(end)
        except ShutdownRequested as error:
            end = run.interrupted_end(f"{error}; the same command continues")
        except Fenced as fenced:
            run.say(f"fenced: {fenced}")
            end = FlowEnd(reason=FlowOutcome.FENCED, message=str(fenced))
        except LiveOwner as error:
            owner = run.log.state.open_attempt
            if owner is None or owner.flow_run_id is None or owner.flow_run_id != host.flow_run.id:
                raise
            run.say(message := f"{error}; it trains in this very flow run, whose state is left alone")
            end = FlowEnd(reason=FlowOutcome.TRAINED_ELSEWHERE, message=message)
        except (StoreUnavailable, AppendUnknown) as error:  # not even the receipt: the next claim writes it
            end = FlowEnd(reason=FlowOutcome.STORAGE, message=f"{error}; the same command continues")
        end = name_successor(end, run.log, run.say)
        end = replace(end, message=name_store(end.message, run.log.store.url, os.environ))
        run.machines.end(EXIT_CODES[end.reason])
    return end


def train_attempt(run: active_run.ActiveRun, started: AttemptStarted, steps: Steps) -> AttemptEnded:
    """Train from the newest commit until the run is complete or something ends the attempt; append its receipt."""
    trainer, evaluations = attempt_trainer.AttemptTrainer(run, started), AttemptEvaluations(run, started.attempt)
    problem: TrainerGone | StorageError | None = None
    try:
        with trainer.beating():
            try:
                if not run.too_few_machines and not run.is_shutting_down():
                    evaluations.start_missing(steps)
                    if started.first_step < run.last_step and not evaluations.stop_run():
                        with trainer.running():
                            train_segments(run, trainer, evaluations, steps)
                    run.retry.call(finish_run, run, started.attempt)
            except (TrainerGone, StorageError) as error:
                problem = error
            evidence = trainer.evidence(problem)
        ended = attempt_trainer.record_end(run, evidence, trainer.heartbeat(0))
    finally:
        evaluations.finish()
    run.say(f"attempt {ended.attempt} ended: {ended.reason} at step {ended.last_step}: {ended.detail}")
    return ended


def train_segments(
    run: active_run.ActiveRun, trainer: attempt_trainer.AttemptTrainer, evaluations: AttemptEvaluations, steps: Steps
) -> None:
    """Train segment after segment; each is committed and evaluated beside the next. Raises what ends the attempt."""
    commit: Future[CheckpointReference] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="commit") as beside:
        for segment in trainer.segments(evaluations):
            shown = steps if is_shown(segment, run.config.training.steps) else PLAIN
            trained = shown.train_segment(segment, trainer)  # a failure is a value
            if trained.problem is not None:
                raise trained.problem
            if trained.is_staged and trained.done is not None:
                step = trained.done.step
                _await(run, commit)
                due = commit_checkpoint.Commit(
                    attempt=segment.attempt,
                    done=trained.done,
                    writer=run.writer(segment.attempt),
                    retry=run.retry,
                    evaluations=evaluations.plans_at(step),
                )
                commit = beside.submit(copy_context().run, shown.commit_checkpoint, due, trainer.wait_staged, run.log)
                commit.add_done_callback(run.note_commit)
                evaluations.follow(commit, step, shown)
        _await(run, commit)


def _await(run: active_run.ActiveRun, commit: Future[CheckpointReference] | None) -> None:
    try:
        if commit is not None:
            commit.result()
    except CheckpointLost as lost:  # a later one holds what it would have held
        run.say(f"  {lost}")


def is_shown(segment: train_segment.Segment, total_steps: int) -> bool:
    """Whether the segment is shown: the first and the last one, and each that passes an n-th part of the run."""
    passes = segment.first * _GROUPS // total_steps < segment.until * _GROUPS // total_steps
    return segment.first == 0 or passes or segment.until == total_steps


def watched_by(witness: flow_run.Witness) -> Steps:
    """Return the plain steps, each shown by a witness, whose failures never reach them."""
    chain = Chain()

    def watch(step: Task[..., Any]) -> Callable[..., Any]:
        def perform(record: object, *arguments: Any) -> Any:
            if not chain.admit(step):
                return step.fn(record, *arguments)
            value, shown = None, uuid4()
            try:
                with witness.showing(step, name_of(step, (record, *arguments)), shown, chain.before(record)) as states:
                    value = step.fn(record, *arguments)
                    states.append(state_of(value))
            finally:
                chain.add(record, value, shown)
            return value

        return perform

    return steps_by(watch)
