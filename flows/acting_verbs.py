"""The verbs that do something: train, measure, promote, write, delete.

Owns what a person types to act. Each verb imports what it needs when it runs. Refuses to know how anything is done.
"""

import os
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from flows.exit_code import ExitCode
from flows.output import print_document, say
from flows.store_choice import choose_store
from flows.verb_options import AliasOption, JsonOption, Overrides, Reference, StoreOption, WhyOption, opened_store

TokenPaths = Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True, help=".bin files, in order")]


def train(
    config: str = "",
    *,
    run_id: str = "",
    set_: Overrides = (),
    start_over: Annotated[bool, Parameter(negative="")] = False,
    store: StoreOption = "",
    json: JsonOption = False,
) -> ExitCode:
    """Train a run to its end, or continue it: the same command again goes on from the newest commit.

    Args:
        config: path of the run configuration (TOML); may be left out for a run that exists.
        run_id: name of the run [the configuration file's name].
        start_over: where a run has commits and none can be read any more, begin again at step 0 instead of exit 5.
    """
    from flows.prefect_session import Terminated, leave_undelivered, run_train_gpt, terminable
    from flows.preflight import TrainingRequest, check_before_start, named_run
    from flows.run_lookup import find_run
    from flows.run_status import view_status
    from flows.training_summary import summarize

    request = TrainingRequest(config=config, run_id=run_id, overrides=set_, start_over=start_over)
    try:
        with terminable():
            configuration = check_before_start(opened_store(store), request, os.environ)
            end = run_train_gpt(request, choose_store(store, os.environ), say=say)
    except Terminated:
        say("preempted; the same command continues")
        return ExitCode.PREEMPTED
    log = find_run(opened_store(store), named_run(request))
    if end.code is ExitCode.DONE:
        for line in summarize(log, configuration, ending=end.message, store_option=store):
            say(line)
    else:
        say(f"cairn: {end.message}")
    if json:
        print_document(view_status(log))
    leave_undelivered(end.code)
    return end.code


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
    from flows.prefect_session import quieten
    from flows.run_watching import WatchRequest, watch_until_stopped, watcher
    from flows.tables import print_watch

    quieten(os.environ)
    request = WatchRequest(
        deployment=deployment, every_seconds=every, at_most=at_most, store=choose_store(store, os.environ)
    )
    tell = print_document if json else print_watch
    if once:
        tell(watcher(request).look_patiently())
    else:
        watch_until_stopped(request, tell=lambda rows: tell(rows) if rows else None, say=say)


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
    from flows.run_sweep import sweep_one
    from flows.tables import print_sweep

    report = sweep_one(opened_store(store), run, dry_run=dry_run)
    print_document(report) if json else print_sweep(report)


def evaluate(
    reference: Reference,
    *,
    suite: str = "",
    again: Annotated[bool, Parameter(negative="")] = False,
    store: StoreOption = "",
    json: JsonOption = False,
) -> ExitCode:
    """Measure a committed checkpoint, in processes of their own, and show it beside others; nothing is trained.

    What is on record is not measured again. Exit 1 where an evaluator failed: that is on record too.

    Args:
        suite: path of a suite file (TOML) [the suites of the checkpoint's run].
        again: measure also what is on record, and add a second row.
    """
    from flows.checkpoint_evaluation import EvaluationRequest, compare, measure
    from flows.evaluation_tables import print_comparison
    from flows.run_lookup import find_checkpoint

    found = find_checkpoint(opened_store(store), reference)
    view = compare(found, measure(found, EvaluationRequest(suite=suite, again=again)))
    print_document(view) if json else print_comparison(view)
    return ExitCode.DONE if view.status == "recorded" else ExitCode.ERROR


def promote(
    reference: Reference,
    *,
    alias: AliasOption = "champion",
    why: WhyOption = "",
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Offer a checkpoint to an alias: the gates decide, the decision is recorded, exit 3 is a no.

    Where the run's configuration requires a person's approval, this is it.
    """
    from flows.model_tables import print_models
    from flows.model_views import view_alias
    from flows.promotion_use import offer_to
    from flows.run_lookup import find_checkpoint

    views = view_alias(alias, offer_to(find_checkpoint(opened_store(store), reference), alias, why=why))[:1]
    print_document(views[0]) if json else print_models(views)


def rollback(
    *,
    alias: AliasOption = "champion",
    why: WhyOption = "",
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Point an alias back at what it pointed at before; the decision is recorded. Again: one further back."""
    from flows.model_tables import print_models
    from flows.model_views import roll_back
    from flows.promotion_use import this_person

    view = roll_back(opened_store(store), alias, by=this_person(), why=why)
    print_document(view) if json else print_models([view])


def sample(
    reference: Reference,
    *,
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    prompt_file: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    count: int | None = None,
    stop_at_end: Annotated[bool, Parameter(negative="--ignore-end-of-text")] = True,
    device: Literal["cpu", "cuda", "auto"] = "cpu",
    follow: Annotated[bool, Parameter(negative="")] = False,
    every: float = 2.0,
    store: StoreOption = "",
    json: JsonOption = False,
) -> ExitCode:
    """Let a committed checkpoint write; the text appears as it is drawn, and Ctrl-C ends it.

    The network sees at most a block of text; whenever that is full, it goes on from the newest half of it.

    Args:
        prompt: what the text begins with, - for stdin; without one a new text begins.
        prompt_file: path of what the text begins with.
        tokens: at most this many tokens follow.
        temperature: 0 takes the likeliest token each time.
        top_k: draw from this many likeliest tokens; 0 leaves all in.
        top_p: draw from the fewest likeliest tokens that have this chance together; 1 leaves all in.
        seed: equal seeds give equal text on one device.
        count: so many texts, drawn with --seed, --seed + 1, …; with --json a list of them.
        stop_at_end: stop where the text ends, or write on behind the end-of-text token.
        device: where it is computed; auto takes a GPU where there is one.
        follow: RUN's newest checkpoint writes, then each new one as it is committed, until the run has finished.
        every: seconds between two looks of --follow.
    """
    from flows.checkpoint_following import follow_run
    from flows.run_lookup import find_checkpoint
    from flows.text_display import end_interrupted, show_nothing, show_text, write_checkpoint
    from flows.text_sampling import SampleRequest, read_prompt

    try:
        request = SampleRequest(
            prompt=read_prompt(prompt, prompt_file, sys.stdin.buffer),
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            count=1 if count is None else count,
            stop_at_end=stop_at_end,
            device=device,
        )
        if follow:
            follow_run(opened_store(store), reference, request, every_seconds=every, json=json)
            return ExitCode.DONE
        found = find_checkpoint(opened_store(store), reference)
        written = write_checkpoint(found, request, show=show_nothing if json else show_text)
    except KeyboardInterrupt:
        return end_interrupted()
    if json:
        print_document(written[0] if count is None else written)
    return ExitCode.DONE


def export(reference: Reference, folder: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Write a committed checkpoint as a directory that `transformers` opens, with a model card that says whence it is.

    Args:
        folder: a new or empty folder; nothing is overwritten.
    """
    from pathlib import Path

    from flows.model_export import export_model
    from flows.run_lookup import find_checkpoint

    written = export_model(find_checkpoint(opened_store(store), reference), Path(folder))
    if json:
        print_document(written)
    else:
        for file in written.files:
            print(f"{Path(written.folder) / file.name}  {file.bytes:,} bytes")


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
    from flows.data_trade import ImportRequest, import_snapshot
    from flows.tables import print_import

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
    from flows.data_trade import export_snapshot

    written = export_snapshot(opened_store(store), reference, folder, form)
    if json:
        print_document(written)
    else:
        for file in written:
            print(f"{file.path}  {file.tokens:,} tokens")


ACTING_VERBS = (
    train,
    watch,
    sweep,
    evaluate,
    promote,
    rollback,
    sample,
    export,
    import_tokens,
    export_tokens,
)
