"""The commands `train`, `fork` and `watch`."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from cairn.cli.app import Flag, Json, Overrides, Reference, Seconds, Url, open_chosen_store
from cairn.cli.texts import describe_finished_run, describe_plan, note_no_runs, print_set, print_watch
from cairn.reports.queries.run_lookup import find_checkpoint
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.attempt.shutdown_signal import Terminated, exit_on_notice, raise_on_notice
from cairn.tasks.configuration.addresses import choose_store, store_option
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import work_folder
from cairn.tasks.policy.termination import EXIT_CODES, ExitCode, FlowEnd
from cairn.tasks.text.output import print_document, print_facts, say

if TYPE_CHECKING:
    from cairn.flows.preparation.training_request import ResolvedRequest
    from cairn.tasks.configuration.run_configuration import RunConfig


_LEAVING = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)  # no further run of a set is begun: this process has to leave


def train(
    config: str = "",
    *,
    run_id: str = "",
    set_: Overrides = (),
    start_over: Flag = False,
    dry_run: Flag = False,
    machines: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    gpu_memory: Annotated[float, Parameter(validator=validators.Number(gte=0, lt=math.inf))] = 0.0,
    overfit_one_batch: Flag = False,
    store: Url = "",
    json: Json = False,
) -> ExitCode:
    """Train a run to its end, or continue it: the same command again continues from the newest commit.

    `--set key=value,value` trains a run for each value, one after the other, named RUN.key=value, and
    `cairn compare RUN` compares them; with several such keys, a run for each combination. Values are written as in
    TOML: a list in brackets is one value, and so is text without quotes. `[set]` may drop the worst on the way
    (set.halving), and bounds their steps and device hours together. At the end the runs stand in a table, and are drawn
    into RUN.png; with --json a set prints a list.

    Args:
        config: path of the run configuration (TOML); may be left out for a run that exists.
        run_id: name of the run, or of the set [the configuration file's name].
        start_over: if a run has commits and none can be read any more, begin again, a fork where it began, not exit 5.
        dry_run: say what would happen, and how much memory, time, money and store it would take; start nothing.
        machines: with --dry-run: plan for so many machines, which need not be there [those of CAIRN_NODES].
        gpu_memory: with --dry-run: plan for GPUs of so many GB, which need not be there [this machine].
        overfit_one_batch: train on a few windows alone until they are known by heart, exit 1 if they never are; writes
            nothing.

    Examples:
        cairn train run.toml
        cairn train run.toml --dry-run
        cairn train run.toml --dry-run --machines 64 --gpu-memory 80
        cairn train run.toml --overfit-one-batch
        cairn train run.toml --run-id wide --set model.n_embd=256
        cairn train --run-id wide
        cairn train run.toml --run-id rates --set training.lr=1e-3,3e-4
        cairn train run.toml --set training.lr=1e-3,2e-3,4e-3 --set set.halving=2
    """
    from cairn.flows.orchestrator.session_server import SessionServer
    from cairn.flows.preparation.training_request import TrainingRequest, choose_run_id, resolve_request
    from cairn.flows.run.node_service import is_other_node
    from cairn.operations import prefect_session
    from cairn.tasks.configuration.configuration_source import expand_set
    from cairn.tasks.trainer.trainer_process import WarmTrainer

    request = TrainingRequest(config=config, run_id=run_id, overrides=set_, store=store, start_over=start_over)
    members = expand_set(choose_run_id(request), request.overrides)
    requests = [replace(request, run_id=one.run_id, overrides=one.overrides) for one in members]
    resolved = [resolve_request(one, os.environ) for one in requests]  # a value that is refused stops all of them
    rungs = prefect_session.plan_rungs(resolved, os.environ)
    if rungs and not json:
        say(f"halving: {', '.join(f'{rung.kept} go on from step {rung.step}' for rung in rungs)}")
    if dry_run or machines or gpu_memory:
        return _print_plans(resolved, machines, int(gpu_memory * 1e9), is_dry=dry_run, json=json)
    if overfit_one_batch or is_other_node(os.environ):
        return _act_once(resolved, is_trial=overfit_one_batch, json=json)
    server, code, is_set = SessionServer(os.environ, say=say), ExitCode.DONE, len(members) > 1
    with closing(WarmTrainer(is_of_set=is_set)) as warm:
        for one in prefect_session.train_in_turn(resolved, rungs, os.environ, say):
            try:
                with prefect_session.training_session(one, server, warm) as (log, configuration, train_run, finish):
                    finish(end := train_run())
                ended = _say_end(one.store_url, log, configuration, end, is_member=is_set)
            except Terminated:
                say("preempted; the same command continues")
                ended = ExitCode.PREEMPTED
            if (code := ended if ended in _LEAVING else code or ended) in _LEAVING:  # else the first that is not 0
                break
            exit_on_notice(ExitCode.PREEMPTED)  # until the next run listens
    _say_all(resolved, choose_run_id(request) if is_set else "", code, json=json)
    prefect_session.leave_undelivered(code, server)
    return code


def _say_all(members: "Sequence[ResolvedRequest]", set_name: str, code: ExitCode, *, json: bool) -> None:
    """Print what the logs say: as JSON, of a set in a list; else the runs of a set beside each other."""
    from cairn.reports.queries.run_status import read_status

    exit_on_notice(code)
    if not json and (not set_name or code in _LEAVING):
        return
    logs = [log for one in members if (log := one.open_log()).refresh().attempts or not set_name]
    if json:
        statuses = [read_status(log) for log in logs]
        print_document(statuses if set_name else statuses[0]) if statuses else None
    elif logs:
        print_set(logs, set_name)


def _say_end(store_url: str, log: RunLog, configuration: "RunConfig", end: FlowEnd, *, is_member: bool) -> ExitCode:
    """Say how a run ended, of a set in one line, and return its code; its log is read where it is printed."""
    code = EXIT_CODES[end.reason]
    exit_on_notice(code)
    if code is not ExitCode.DONE:
        say(f"cairn: {end.message}")  # first: the store that ended it may refuse to be read
    if code is ExitCode.DONE:
        log.refresh()
        lines = describe_finished_run(log, configuration, store_url, end.message)
        for line in islice(lines, 1 if is_member else None):
            say(line)
    return code


def fork(reference: Reference, new_run: str, *, set_: Overrides = (), store: Url = "", json: Json = False) -> None:
    """Open a run that begins with the train state of a committed checkpoint; no byte is copied, nothing is trained.

    Weights, optimizer, generators and step come from the checkpoint, the configuration from its run: more steps,
    another schedule, other text are set. The network, its precision and its tokenizer stay.

    Args:
        new_run: name of the run that is opened.

    Examples:
        cairn fork quickstart longer --set training.steps=1200
        cairn fork quickstart@400 gentler --set training.lr=5e-4
        cairn fork champion on --set training.steps=900 --set 'data.sources=["a.txt"]'
    """
    from cairn.operations.person_decisions import fork_run

    found = find_checkpoint(open_chosen_store(store), reference)
    made = fork_run(found, new_run, set_, os.environ, Path.cwd())
    if json:
        print_document(made)
        return
    begin = f"begins with step {found.reference.step} of run {found.log.run_id}"
    say(f"run {new_run} {begin} and goes to step {made.opened.total_steps}")
    for key, value in made.changed.items():
        say(f"  {key} = {value}")
    say(f"train it: cairn train --run-id {new_run}{store_option(store, os.environ)}")


def _check(
    resolved: "ResolvedRequest", variables: Mapping[str, str] = os.environ, *, is_here: bool = True
) -> "tuple[RunLog, RunConfig]":
    """Return the log and the checked configuration; write nothing. Its device is here, or planned for."""
    from cairn.flows.preparation.preflight import check_before_start

    log = resolved.open_log()
    return log, check_before_start(resolved, log, variables, writes=False, is_here=is_here)


def _settle(configuration: "RunConfig", *, is_here: bool = True) -> "RunConfig":
    """Return the configuration with the numerics of this machine, or of a GPU planned for; write nothing."""
    from cairn.model.estimates.numerics import MachineSpeed, choose_numerics
    from cairn.tasks.machine.machine_speed import numerics_here

    training, model = configuration.training, configuration.model
    if is_here:
        numerics = numerics_here(training, model, work_folder(os.environ), keep=False)
    else:
        numerics = choose_numerics(training, model, MachineSpeed(has_cuda=True, cuda_has_half=True))
    return configuration.with_mode(precision=numerics.precision, kernels=numerics.kernels)


def _print_plans(
    members: "Sequence[ResolvedRequest]", machines: int, gpu_bytes: int, *, is_dry: bool, json: bool
) -> ExitCode:
    """Say what would happen, of a set run by run; refuse what a start would refuse.

    `machines` and the memory of their GPUs, if not 0, are planned for instead of those that are there.
    """
    from cairn.flows.preparation import preflight, training_plan
    from cairn.flows.preparation.training_request import resolve_request
    from cairn.tasks.trainer.trainer_group import planned_variables, trainer_group

    if not is_dry:
        raise InvalidConfiguration("--machines, --gpu-memory: are planned for and not started; rule: with --dry-run")
    plans, variables = [], planned_variables(os.environ, machines) if machines else os.environ
    on_gpu = ("training.device=cuda",) if gpu_bytes else ()
    for member in members:
        planned = replace(member.request, overrides=(*member.request.overrides, *on_gpu))
        resolved = resolve_request(planned, os.environ) if on_gpu else member
        log, configuration = _check(resolved, variables, is_here=not gpu_bytes)
        settled = _settle(configuration, is_here=not gpu_bytes)
        group = trainer_group(settled.training, variables, spares=settled.machines.spares)
        memory = preflight.available_memory(settled.training, group, planned_bytes=gpu_bytes)
        plan = training_plan.plan_training(log, settled, resolved.base_dir, memory)
        plans.append((plan, settled, memory, log.store))
        if not json:
            print_facts(describe_plan(plan, settled))
    if json:
        print_document([plan for plan, *_ in plans] if len(plans) > 1 else plans[0][0])
    for plan, settled, memory, run_store in plans:
        preflight.require_memory(settled, plan.data.vocab_size, plan.memory.sizes, memory)
        if plan.action != training_plan.PlanAction.NOTHING:
            preflight.require_room(run_store, plan.room)
    return ExitCode.DONE


def _act_once(members: "Sequence[ResolvedRequest]", *, is_trial: bool, json: bool) -> ExitCode:
    """Overfit one batch, and write nothing; else lend this machine to the run's trainer.

    The first of several machines trains the run; all were given the same command.
    """
    from cairn.flows.run.node_service import NodeService
    from cairn.tasks.trainer.trainer_group import trainer_group

    if len(members) > 1:
        raise InvalidConfiguration("--set: names a set of runs, and this is done for one run: give each key one value")
    log, configuration = _check(members[0])
    if not is_trial:
        group = trainer_group(configuration.training, os.environ, spares=configuration.machines.spares)
        return NodeService(log, configuration, group, work_folder(os.environ), say=say).run()
    from cairn.operations.unrecorded_training import overfit_one_batch

    found = overfit_one_batch(_settle(configuration), log, members[0].base_dir, say)
    print_document(found) if json else print(f"{'sound' if found.sound else 'NOT SOUND'}: {found.why}")
    return ExitCode.DONE if found.sound else ExitCode.ERROR


def watch(
    *,
    once: Flag = False,
    deployment: str = "",
    every: Seconds = 30.0,
    at_most: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    metrics_port: int = 0,
    metrics_token_file: str = "",
    otlp: Flag = False,
    store: Url = "",
    json: Json = False,
) -> None:
    """Continue every unfinished run whose owner is gone or whose back-off is over; safe to run many times at once.

    Args:
        once: poll once, print what was done and why, and exit.
        deployment: continue runs by flow runs of this deployment (flow/deployment) instead of on this machine.
        every: seconds between two polls.
        at_most: how many runs are continued on this machine at a time.
        metrics_port: answer Prometheus on this port of 127.0.0.1 with the numbers of all runs [no port].
        metrics_token_file: file with the token that a monitor of any user sends as Bearer [only this user's own token].
        otlp: send the same numbers by OpenTelemetry's protocol to where OTEL_EXPORTER_OTLP_ENDPOINT says.

    Examples:
        cairn watch
        cairn watch --once --json
        cairn watch --deployment train-gpt/train-gpt
        cairn watch --metrics-port 9464
    """
    if once and (metrics_port or otlp):
        raise InvalidConfiguration("--once polls once and ends: leave out --metrics-port and --otlp, or --once")
    from cairn.flows.orchestrator import prefect_settings, session_server
    from cairn.flows.watching import run_watcher
    from cairn.reports.text import progress

    session_server.settle_client(os.environ, say=say)
    prefect_settings.quieten_prefect(os.environ)
    open_chosen = partial(run_watcher.open_watcher, choose_store(store, os.environ), deployment, at_most=at_most)
    note_no_runs(open_chosen_store(store))
    print_rows = print_document if json else print_watch
    if once:
        with (watcher := open_chosen()).delivering_notices(say):
            print_rows(watcher.poll_patiently())
        return
    if metrics_port:
        from cairn.ui.local_server import serve_metrics

        say(f"metrics: {serve_metrics(open_chosen_store(store), metrics_port, metrics_token_file)}")
    with ExitStack() as beside:
        if otlp:
            from cairn.reports.queries.run_metrics import sending_metrics

            beside.enter_context(sending_metrics(open_chosen_store(store), os.environ, say))
        show = None if json else beside.enter_context(progress.showing_progress(say))

        def report(rows: tuple[run_watcher.WatchRow, ...]) -> None:
            if rows:
                print_rows(rows)
            if show:
                show(watcher.progress())

        try:
            with raise_on_notice(), (watcher := open_chosen()).delivering_notices(say):
                watcher.watch(every_seconds=every, report=report, say=say)
        except (Terminated, KeyboardInterrupt):
            say("stopped watching; what was continued goes on")
