"""The runs of a command in turn, as logs and `[set]` say; the warm trainer, and the witness that shows one in Prefect.

Imports Prefect only when training begins, while the trainer imports its own; the server starts after the first step.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from cairn.flows.operations.checkpoint_operations import end_on_record
from cairn.flows.orchestrator import prefect_server, prefect_settings, run_notices, session_server
from cairn.flows.preparation import preflight, training_request
from cairn.reports.exporters.exporters import run_exporters
from cairn.storage.errors import StorageError
from cairn.storage.logs import log_entry, run_log
from cairn.tasks.attempt import attempt_entries, shutdown_signal
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.evaluator.evaluation_run import suite_of
from cairn.tasks.machine import placement, process_scopes
from cairn.tasks.policy import early_stop, run_set
from cairn.tasks.policy.termination import EXIT_CODES, ExitCode, FlowEnd, FlowOutcome
from cairn.tasks.text import format, output
from cairn.tasks.trainer.trainer_process import WarmTrainer

Members = Sequence[training_request.ResolvedRequest]


def plan_rungs(members: Members, environment: Mapping[str, str]) -> tuple[run_set.Rung, ...]:
    """Return the rungs of a set; raises `InvalidConfiguration` where they could not compare its runs."""
    configs = [_configure(member, environment) for member in members] if len(members) > 1 else []
    if not configs or (factor := configs[0].set.halving) is None:
        return ()
    steps, checkpoint, evaluation = configs[0].training.steps, configs[0].checkpoint, configs[0].evaluation
    interval, problem = checkpoint.every_steps * evaluation.every_commits, ""
    if any((one.training.steps, one.checkpoint, one.evaluation) != (steps, checkpoint, evaluation) for one in configs):
        problem = "a rung compares runs with the same training.steps, checkpoint and evaluation alone"
    elif interval >= steps:
        problem = f"no evaluation is due before step {steps}, the first is at {interval}; lower checkpoint.every_steps"
    if problem:
        raise InvalidConfiguration(f"set.halving = {factor}: {problem}")
    return run_set.plan_rungs(len(members), factor=factor, total_steps=steps, interval=interval)


def train_in_turn(
    members: Members, rungs: Sequence[run_set.Rung], environment: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[training_request.ResolvedRequest]:
    """Yield each run when it is to be trained, with its limit; the caller trains it before it asks for the next.

    Runs that lose at a rung are finished in between.
    """
    if len(members) == 1 or not (config := _configure(members[0], environment)).set.is_on:
        yield from members
        return
    logs, suite, before = [member.open_log() for member in members], suite_of(config.evaluation).sha256, None
    trials = [run_set.read_trial(log.refresh(), suite) for log in logs]
    while (move := run_set.next_move(trials, rungs, config.training.steps)) is not None:
        log, limit = logs[move.place], run_set.find_limit(move, trials, config.set)
        if (move.place, trials[move.place]) == before:
            say(f"the set stops at run {log.run_id}, which comes no further; the same command continues")
            return
        before = move.place, trials[move.place]
        if move.stop is not None:
            say(f"run {log.run_id}: {move.stop.why}")
            _drop(log, move.stop)
        elif limit is None:
            left = [log.run_id for log, trial in zip(logs, trials, strict=True) if not trial.is_over]
            say(f"the budget of the set is spent; not trained to the end: {format.format_list(left, 10)}")
            return
        else:
            yield replace(members[move.place], limit=limit)
        trials[move.place] = run_set.read_trial(log.refresh(), suite)


def _configure(member: training_request.ResolvedRequest, environment: Mapping[str, str]) -> RunConfig:
    return member.configuration or training_request.configure_run(member, member.open_log().refresh(), environment)


def _drop(log: run_log.RunLog, stop: early_stop.Stop) -> None:
    """Append run-finished with the run's last commit, unless another process trains it now."""
    state = log.refresh()
    if state.newest_committed is not None:
        body = early_stop.finish(state.newest_committed.committed, state.latest_attempt, stop)
        log.append(lambda now: None if now.finished or now.open_attempt else body, writer=log_entry.this_writer())


def end_without_flow(log: run_log.RunLog, config: RunConfig, environment: Mapping[str, str]) -> FlowEnd | None:
    """Return the end of a run that is finished, after exporters and sweep; None for any other; raises `LiveOwner`."""
    by_person = not environment.get("CAIRN_CONTINUED_BY", "").strip()
    attempt_entries.refuse_live_owner(log, config.lease, is_asked_by_person=by_person)
    if not (ended := end_on_record(log, config)):
        return None
    with (
        run_exporters(log, config.exporters, environment, output.say),
        run_notices.delivering_notices(log, config.notify, output.say),
        suppress(StorageError),
    ):
        sweep_run(log, config.checkpoint, suite_of(config.evaluation).sha256)
    step = log.state.high_water_step
    return FlowEnd(reason=FlowOutcome.COMPLETED, message=f"it is finished, at step {step}; nothing to do: {ended}")


@contextmanager
def training_session(
    resolved: training_request.ResolvedRequest, server: session_server.SessionServer, warm: WarmTrainer
) -> Iterator[tuple[run_log.RunLog, RunConfig, Callable[[], FlowEnd], Callable[[FlowEnd], None]]]:
    """Yield a run's log and configuration, what trains it to an end, at once of a finished one, and what shows the end.

    A small text is prepared while Prefect is imported.
    """
    with shutdown_signal.raise_on_notice() as add_signal:
        log = resolved.open_log()
        config = preflight.check_before_start(resolved, log, os.environ)
        add_signal(config.preemption.signal)
        if (ended := end_without_flow(log, config, os.environ)) is not None:
            yield log, config, lambda: ended, lambda _: None
            return
        folder = placement.trainer_folder(os.environ, log)
        server.choose()
        if log.state.finished is None:
            warm.start(folder)
        preparing = preflight.preparing_text(resolved, config, log, partial(warm.measure_speed, folder))
        with preparing, process_scopes.collecting_no_garbage():
            prefect_settings.import_prefect(say=output.say, refresh=True)
            from cairn.flows import train_gpt
            from cairn.flows.orchestrator import flow_run, flow_run_tags, run_overview
            from cairn.flows.run import active_run, run_start
        given = asdict(resolved.request) | {"run_id": resolved.run_id, "store": resolved.store_url}
        given["overrides"] = list(resolved.request.overrides)
        name = run_overview.flow_run_name(log.run_id, log.state.latest_attempt)
        witness = flow_run.Witness(train_gpt.train_gpt, name, given, server)
        shown, by = witness.flow_run, run_start.starter(os.environ)
        if not server.is_ephemeral:
            shown.wanted.set()  # a server that runs already takes no core from the first step
        host = active_run.Host(shutdown=shutdown_signal.ShutdownSignal(), warm=warm, flow_run=shown, continued_by=by)

        def finish(end: FlowEnd) -> None:
            shutdown_signal.exit_on_notice(EXIT_CODES.get(end.reason, ExitCode.ERROR))
            if shown.id is not None and not prefect_server.is_ephemeral_server(os.environ):
                flow_run_tags.emit_end(end, shown.id, witness.name)
            witness.finish(end, at_once=host.shutdown.signal is not None)  # a process that has to leave waits for none

        try:
            yield log, config, partial(train_gpt.train, resolved, train_gpt.watched_by(witness), host), finish
        except BaseException as error:
            witness.finish(FlowEnd(reason=flow_run.reason_of(error), message=str(error)), at_once=True)
            raise


def leave_undelivered(code: ExitCode, server: session_server.SessionServer) -> None:
    """Exit at once with `code` if Prefect's API takes no events: at exit it would retry each of them for seconds."""
    if "prefect" not in sys.modules:  # nothing was trained
        return
    from prefect.events.worker import EventsWorker

    outcome: Any = EventsWorker.drain_all(timeout=0.0 if server.is_lost else 30.0)
    if outcome.not_done:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
