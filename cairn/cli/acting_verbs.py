"""The verbs that do something: train, watch, delete, bring tokens in and out; `model_verbs` use what was trained.

Owns what a person types to act. Each verb imports what it needs when it runs. Refuses to know how anything is done.
"""

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from cairn.cli.verb_options import JsonOption, Overrides, StoreOption, opened_store
from tasks.attempt.exit_on_sigterm import Terminated, exit_on_sigterm, preempted_by_sigterm
from tasks.configuration.store_choice import choose_store
from tasks.policy.termination import ExitCode
from tasks.text.output import print_document, print_facts, print_line, say

if TYPE_CHECKING:
    from flows.preparation.preflight import TrainingRequest

_NODE_PATIENCE_SECONDS = 900.0
TokenPaths = Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True, help=".bin files, in order")]


def train(
    config: str = "",
    *,
    run_id: str = "",
    set_: Overrides = (),
    start_over: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    store: StoreOption = "",
    json: JsonOption = False,
) -> ExitCode:
    """Train a run to its end, or continue it: the same command again goes on from the newest commit.

    Args:
        config: path of the run configuration (TOML); may be left out for a run that exists.
        run_id: name of the run [the configuration file's name].
        start_over: where a run has commits and none can be read any more, begin again at step 0 instead of exit 5.
        dry_run: say what would happen, and how much memory, time, money and store it would take; start nothing.
    """
    exit_on_sigterm(ExitCode.PREEMPTED)  # what is imported now takes a second, and nothing has begun
    from cairn.cli.training_summary import summarize
    from cairn.operations.prefect_session import PrefectServer, leave_undelivered, run_train_gpt
    from flows.preparation.preflight import TrainingRequest, check_before_start, named_run
    from flows.preparation.training_store import store_option, training_store
    from flows.run.node_service import is_other_node
    from reports.queries.run_lookup import find_run
    from reports.queries.run_status import view_status

    request = TrainingRequest(config=config, run_id=run_id, overrides=set_, start_over=start_over)
    if dry_run:
        _show_plan(request, training_store(store, request, os.environ), json=json)
        return ExitCode.DONE
    if is_other_node(os.environ):
        return _serve_node(request, training_store(store, request, os.environ))
    try:
        with preempted_by_sigterm():
            chosen = training_store(store, request, os.environ)
            server = PrefectServer(os.environ, say=say)
            configuration = check_before_start(opened_store(chosen), request, os.environ, before_text=server.begin_own)
            end = run_train_gpt(request, chosen, server)
    except Terminated:
        say("preempted; the same command continues")
        return ExitCode.PREEMPTED
    exit_on_sigterm(end.code)
    log = find_run(opened_store(chosen), named_run(request))
    if end.code is ExitCode.DONE:
        for line in summarize(log, configuration, ending=end.message, store_option=store_option(chosen, os.environ)):
            say(line)
    else:
        say(f"cairn: {end.message}")
    if json:
        print_document(view_status(log))
    leave_undelivered(end.code)
    return end.code


def _serve_node(request: "TrainingRequest", store: str) -> ExitCode:
    """Lend this machine to the run that the first of several trains; all were given the same command."""
    from flows.preparation.preflight import check_before_start, named_run
    from flows.run.node_service import NodeService
    from storage.logs.run_log import RunLog
    from tasks.machine.work_folder import work_folder
    from tasks.trainer.trainer_group import trainer_group

    opened = opened_store(store)
    configuration = check_before_start(opened, request, os.environ, writable=False)
    group, log = trainer_group(configuration.training, os.environ), RunLog(opened, named_run(request))
    service = NodeService(log, group, work_folder(os.environ), say=say, patience_seconds=_NODE_PATIENCE_SECONDS)
    return ExitCode.DONE if service.run() else ExitCode.PREEMPTED


def _show_plan(request: "TrainingRequest", store: str, *, json: bool) -> None:
    from cairn.cli.training_plan_text import plan_facts
    from flows.preparation.memory_check import memory_there
    from flows.preparation.preflight import check_before_start, named_run
    from flows.preparation.training_plan import plan_training
    from storage.logs.run_log import RunLog
    from tasks.configuration.configuration_source import configuration_folder
    from tasks.machine.machine_speed import numerics_here
    from tasks.machine.work_folder import work_folder
    from tasks.trainer.trainer_group import trainer_group

    opened = opened_store(store)
    configuration = check_before_start(opened, request, os.environ, writable=False)
    log = RunLog(opened, named_run(request))
    log.refresh()
    mode = numerics_here(configuration.training, configuration.model, work_folder(os.environ), keep=False)
    settled = configuration.with_mode(precision=mode.precision, kernels=mode.kernels)
    there = memory_there(settled.training, trainer_group(settled.training, os.environ))
    plan = plan_training(log, settled, configuration_folder(request.config), there)
    print_document(plan) if json else print_facts(plan_facts(plan))


def watch(
    *,
    once: Annotated[bool, Parameter(negative="")] = False,
    deployment: str = "",
    every: float = 30.0,
    at_most: int = 1,
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Continue every unfinished run whose owner is gone or whose back-off is over; safe to run many times at once.

    Args:
        once: look once, print what was done and why, and leave.
        deployment: continue runs by flow runs of this deployment (flow/deployment) instead of on this machine.
        every: seconds between two looks.
        at_most: how many runs are continued on this machine at a time.
    """
    from cairn.cli.tables import print_watch
    from cairn.operations.prefect_session import quieten
    from flows.watching.run_watching import WatchRequest, watch_until_stopped, watcher
    from flows.watching.watch_display import WatchDisplay

    quieten(os.environ)
    request = WatchRequest(
        deployment=deployment, every_seconds=every, at_most=at_most, store=choose_store(store, os.environ)
    )
    tell = print_document if json else print_watch
    if once:
        tell(watcher(request).look_patiently())
    else:
        display = WatchDisplay()
        with nullcontext() if json else display.shown():
            watch_until_stopped(request, tell=tell, show=(lambda pulses: None) if json else display.show, say=say)


def sweep(
    run: str,
    *,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Apply retention and delete what nobody needs any more; killed anywhere, the same command goes on.

    Args:
        dry_run: say what would go, what stays, and why; change nothing.
    """
    from cairn.cli.tables import print_sweep
    from flows.operations.run_sweep import sweep_one

    report = sweep_one(opened_store(store), run, dry_run=dry_run)
    print_document(report) if json else print_sweep(report)


def import_tokens(
    *,
    train: TokenPaths,
    val: TokenPaths,
    tokenizer: str = "",
    vocab_size: int = 0,
    end_of_text: int = -1,
    allow_shared: Annotated[bool, Parameter(negative="")] = False,
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Make a data snapshot of nanoGPT's or llm.c's .bin files; every token is kept as it is.

    Args:
        tokenizer: the tokenizer.json that made the tokens.
        vocab_size: without a tokenizer: how many ids there are (50257 for GPT-2); text is then shown as numbers.
        end_of_text: without a tokenizer: the id that ends a document [the greatest].
        allow_shared: import although train and val share documents.
    """
    from cairn.cli.tables import print_import
    from cairn.operations.data_trade import ImportRequest, import_snapshot

    request = ImportRequest(
        train=train,
        val=val,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        end_of_text=end_of_text,
        allow_shared=allow_shared,
    )
    found = import_snapshot(opened_store(store), request)
    print_document(found) if json else print_import(found)


def export_tokens(
    reference: Annotated[str, Parameter(help="a snapshot's id, at least 8 characters of it, or RUN")],
    folder: str,
    *,
    form: Annotated[Literal["nanogpt", "llm.c"], Parameter(name="--format")] = "nanogpt",
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Write a data snapshot's splits as token files another trainer reads; every shard is verified first.

    Args:
        folder: where the files go; nothing there is overwritten.
        form: nanogpt writes train.bin and val.bin, llm.c files with its header.
    """
    from cairn.operations.data_trade import export_snapshot

    written = export_snapshot(opened_store(store), reference, folder, form)
    if json:
        print_document(written)
    else:
        for file in written:
            print_line(f"{file.path}  {file.tokens:,} tokens")


ACTING_VERBS = (
    train,
    watch,
    sweep,
    import_tokens,
    export_tokens,
)
