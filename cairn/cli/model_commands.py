"""The commands that use a trained model: measure, promote, sample, export."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cairn.cli.options import AliasOption, Flag, JsonOption, Reference, StoreOption, WhyOption, open_chosen_store
from cairn.cli.tables import print_rows
from cairn.operations.text_sampling import RunSampler, SampleRequest, read_prompt, show_text, write_samples
from reports.queries.display_tables import comparison_table, decisions_table, promotions_table
from reports.queries.run_lookup import find_checkpoint
from tasks.policy.termination import ExitCode
from tasks.text.output import print_document, print_line, say


def models(*, history: Flag = False, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show what every alias points at, and what it can be rolled back to; a star marks the present.

    Args:
        history: show every decision instead: promotions, also those gone back on, refusals with their gate, roll-backs.
    """
    from reports.queries.alias_history import list_decisions, list_promotions

    if history:
        decisions = list_decisions(open_chosen_store(store))
        print_document(decisions) if json else print_rows(decisions_table(decisions))
        return
    views = list_promotions(open_chosen_store(store))
    print_document(views) if json else print_rows(promotions_table(views))


def evaluate(
    reference: Reference, *, suite: str = "", again: Flag = False, store: StoreOption = "", json: JsonOption = False
) -> ExitCode:
    """Evaluate a committed checkpoint in child processes, and compare it with others; nothing is trained.

    What is on record is not evaluated again. Exit 1 if an evaluator failed, which is recorded too.

    Args:
        suite: a suite file (TOML), or the name of one in deployments/suites [the suites of the checkpoint's run].
        again: evaluate also what is on record, and add a second row.
    """
    from flows.operations.checkpoint_evaluation import measure
    from reports.queries.evaluations import compare_evaluations

    found = find_checkpoint(open_chosen_store(store), reference)
    view = compare_evaluations(found, measure(found, suite=suite, again=again))
    print_document(view) if json else print_rows(comparison_table(view))
    return ExitCode.DONE if view.status == "recorded" else ExitCode.ERROR


def promote(
    reference: Reference,
    *,
    alias: AliasOption = "champion",
    why: WhyOption = "",
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Offer a checkpoint to an alias: the gates decide and the decision is recorded; exit 3 is a refusal.

    If the run's configuration requires a person's approval, this command gives it.
    """
    from flows.operations.checkpoint_offer import offer_as_person
    from reports.queries.alias_history import list_alias_promotions

    state = offer_as_person(find_checkpoint(open_chosen_store(store), reference), alias, why=why)
    view = list_alias_promotions(alias, state)[0]
    print_document(view) if json else print_rows(promotions_table([view]))


def rollback(
    *, alias: AliasOption = "champion", why: WhyOption = "", store: StoreOption = "", json: JsonOption = False
) -> None:
    """Point an alias back at what it pointed at before, and record it; repeated, it goes one further back."""
    from cairn.operations.alias_rollback import roll_back
    from flows.operations.checkpoint_offer import this_person

    view = roll_back(open_chosen_store(store), alias, by=this_person(), why=why)
    print_document(view) if json else print_rows(promotions_table([view]))


def sample(
    reference: Reference,
    *,
    options: Annotated[SampleRequest, Parameter(name="*")] = SampleRequest(),  # noqa: B008 (frozen)
    follow: Flag = False,
    every: float = 2.0,
    store: StoreOption = "",
    json: JsonOption = False,
) -> ExitCode:
    """Generate text from a committed checkpoint; it is printed as it is drawn, and Ctrl-C ends it.

    The network sees at most a block of text; whenever that is full, it continues from the newest half of it.

    Args:
        follow: generate from the newest checkpoint of RUN, then from each new one, until the run has finished.
        every: seconds between two looks of --follow.
    """
    from cairn.operations.checkpoint_following import follow_run

    try:
        prompt = read_prompt(options.prompt, options.prompt_file, sys.stdin.buffer)
        request = replace(options, prompt=prompt, prompt_file="")
        if follow:
            follow_run(open_chosen_store(store), reference, request, every_seconds=every, json=json)
            return ExitCode.DONE
        found = find_checkpoint(open_chosen_store(store), reference)
        sampler = RunSampler(found.log, request)
        sampler.load(found.reference)
        written = write_samples(sampler, request, show=(lambda piece: None) if json else show_text)
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            show_text("\n")  # ends the line that Ctrl-C cut
        say("interrupted")
        return ExitCode.INTERRUPTED
    if json:
        print_document(written[0] if request.count is None else written)
    return ExitCode.DONE


def export(reference: Reference, folder: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Write a committed checkpoint as a directory that `transformers` opens, with a model card about its origin.

    Args:
        folder: a new or empty folder; nothing is overwritten.
    """
    from cairn.operations.model_export import export_model

    written = export_model(find_checkpoint(open_chosen_store(store), reference), Path(folder))
    if json:
        print_document(written)
    else:
        for file in written.files:
            print_line(f"{Path(written.folder) / file.name}  {file.bytes:,} bytes")
