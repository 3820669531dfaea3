"""The verbs that use a checkpoint: measure it, offer it to an alias, go back, let it write, hand it on.

Owns what a person types for that. Each verb imports what it needs when it runs. Refuses to know how anything is done.
"""

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from cairn.cli.verb_options import AliasOption, JsonOption, Reference, StoreOption, WhyOption, opened_store
from tasks.policy.termination import ExitCode
from tasks.text.output import print_document, print_line


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
    from flows.operations.checkpoint_evaluation import EvaluationRequest, measure
    from reports.pages.evaluation_tables import print_comparison
    from reports.queries.comparison import compare
    from reports.queries.run_lookup import find_checkpoint

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
    from cairn.cli.model_tables import print_models
    from flows.operations.promotion_use import offer_to
    from reports.queries.model_views import view_alias
    from reports.queries.run_lookup import find_checkpoint

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
    from cairn.cli.model_tables import print_models
    from flows.operations.promotion_use import this_person
    from reports.queries.model_views import roll_back

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
    from cairn.operations.checkpoint_following import follow_run
    from cairn.operations.text_display import end_interrupted, show_nothing, show_text, write_checkpoint
    from cairn.operations.text_sampling import SampleRequest, read_prompt
    from reports.queries.run_lookup import find_checkpoint

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

    from cairn.operations.model_export import export_model
    from reports.queries.run_lookup import find_checkpoint

    written = export_model(find_checkpoint(opened_store(store), reference), Path(folder))
    if json:
        print_document(written)
    else:
        for file in written.files:
            print_line(f"{Path(written.folder) / file.name}  {file.bytes:,} bytes")


MODEL_VERBS = (
    evaluate,
    promote,
    rollback,
    sample,
    export,
)
