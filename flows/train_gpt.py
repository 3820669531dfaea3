"""The flow `train-gpt`: open or continue a run, attempt until it is finished or a budget is spent, promote the best."""

import os

from prefect import flow, runtime

from cairn.flows.orchestrator import flow_end
from cairn.flows.orchestrator import run_parameters as form
from cairn.flows.orchestrator.accelerator_slot import accelerator_slot
from cairn.flows.orchestrator.store_credentials import take_credentials
from cairn.flows.preparation.preflight import check_before_start
from cairn.flows.preparation.training_request import HANDED_OVER, TrainingRequest, resolve_request, with_settings
from cairn.flows.run import active_run, early_attempt, run_opening, run_promotion
from cairn.flows.run.attempt import Attempt
from cairn.flows.watching.deployed_continuation import name_successor
from cairn.reports.text.termination_text import describe_end, describe_left
from cairn.storage.errors import Fenced, NotDurable, StoreRefused
from cairn.storage.logs.run_entries import AttemptEnded
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.policy.termination import EXIT_CODES, DecisionAction, FlowEnd, FlowOutcome, flow_outcome
from cairn.tasks.trainer.warm_trainer import warm_trainer


@flow(name="train-gpt", retries=0, validate_parameters=True, persist_result=False)
@flow_end.ends_in_prefects_words
def train_gpt(
    config: form.Config = "",
    run_id: form.RunId = "",
    steps: form.Steps = 0,
    learning_rate: form.LearningRate = 0.0,
    micro_batch: form.MicroBatch = 0,
    store: form.Store = "",
    store_credentials: form.Credentials = "",
    overrides: form.Overrides = (),
    start_over: form.StartOver = False,
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
    early, handed = early_attempt.begun_early(), HANDED_OVER.get()
    shutdown = handed.shutdown if handed else ShutdownSignal()
    with shutdown.listening(), warm_trainer() as trainer:
        if early is not None:
            run = early.show_in(runtime.flow_run.get_id())
            run_opening.show_preparation(run)
        elif handed is not None:
            run = run_opening.open_run(handed.resolved, shutdown, trainer)
        else:  # no command in this process has resolved and checked it
            take_credentials(store_credentials, os.environ)
            asked = with_settings(overrides, steps=steps, learning_rate=learning_rate, micro_batch=micro_batch)
            request = TrainingRequest(config=config, run_id=run_id, overrides=asked, store=store, start_over=start_over)
            resolved = resolve_request(request, os.environ)
            check_before_start(resolved, resolved.open_log(), os.environ)
            run = run_opening.open_run(resolved, shutdown, trainer)
        with run.running_services(), accelerator_slot(run.say, is_stopping=run.is_shutting_down):
            end = name_successor(_train(run, early), run.log, run.say)
            run.machines.end(EXIT_CODES[end.reason])
    if handed is not None:
        handed.end = end
    return end


def _train(run: active_run.ActiveRun, early: Attempt | None) -> FlowEnd:
    while run.log.refresh().finished is None or run.log.state.open_attempt is not None:
        attempt, early = early, None
        if attempt is None:
            gathered = active_run.gather_machines(run)
            if gathered is None:
                return run.interrupted_end("it waited for other machines")
            run = gathered
            attempt = Attempt(run, active_run.claim_next_attempt(run))
        try:
            ended = _run_attempt(run, attempt)
        except Fenced as fenced:
            run.say(f"fenced: {fenced}")
            return FlowEnd(reason=FlowOutcome.FENCED, message=str(fenced))
        except (StoreRefused, NotDurable) as error:  # not even the receipt: the next claim writes it
            return FlowEnd(reason=FlowOutcome.STORAGE, message=f"{error}; the same command continues")
        if ended.decision.action != DecisionAction.FINISH:
            if stopped := _stopped_end(run, ended):
                return stopped
            run.warm.back_off(ended.decision.delay_seconds, run.work_dir)
    try:
        end = run_promotion.offer_best(run)
    except (StoreRefused, NotDurable) as error:
        return FlowEnd(reason=FlowOutcome.STORAGE, message=f"{error}; the same command continues")
    run.sweep.finish()
    return end


def _run_attempt(run: active_run.ActiveRun, attempt: Attempt) -> AttemptEnded:
    run.overview.change()
    try:
        ended = attempt.run()
    finally:
        if run.shutdown.signal is None:
            attempt.evaluations.wait()
    run.overview.change()
    run.say(f"attempt {ended.attempt} ended: {ended.reason} at step {ended.last_step}: {ended.detail}")
    return ended


def _stopped_end(run: active_run.ActiveRun, ended: AttemptEnded) -> FlowEnd | None:
    """Return the end if the run stops after an attempt that did not finish it, or None if it goes on."""
    decision = ended.decision
    if run.cancellation.is_cancelling():
        return FlowEnd(reason=FlowOutcome.CANCELLED, message=f"{ended.detail}; the same command continues")
    outcome = flow_outcome(ended.reason, decision.action, decision.charged)
    if outcome is None:
        run.say(f"  {decision.reason}; left: {describe_left(decision.left)}")
        return None
    is_given_again = outcome in (FlowOutcome.PREEMPTED, FlowOutcome.INTERRUPTED)
    message = f"{ended.detail}; the same command continues" if is_given_again else describe_end(ended)
    return FlowEnd(reason=outcome, message=message)
