"""The commands that use a trained model: measure, promote, sample, export."""

import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from cairn.cli.options import AliasOption, Flag, JsonOption, Reference, StoreOption, WhyOption, open_chosen_store
from cairn.operations.sample_request import SampleRequest, read_prompt
from tasks.policy.termination import ExitCode
from tasks.text.output import print_document, print_line


def models(*, history: Flag = False, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show what every alias points at, and what it can be rolled back to; a star marks the present.

    Args:
        history: show every decision instead: promotions, also those gone back on, refusals with their gate, roll-backs.
    """
    from cairn.cli.tables import print_rows
    from reports.queries.alias_history import list_decisions, list_promotions
    from reports.queries.display_tables import decisions_table, promotions_table

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
        suite: path of a suite file (TOML) [the suites of the checkpoint's run].
        again: evaluate also what is on record, and add a second row.
    """
    from cairn.cli.tables import print_rows
    from flows.operations.checkpoint_evaluation import EvaluationRequest, measure
    from reports.queries.comparison import compare_evaluations
    from reports.queries.display_tables import comparison_table
    from reports.queries.run_lookup import find_checkpoint

    found = find_checkpoint(open_chosen_store(store), reference)
    view = compare_evaluations(found, measure(found, EvaluationRequest(suite=suite, again=again)))
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
    from cairn.cli.tables import print_rows
    from flows.operations.promotion_by_person import offer_as_person
    from reports.queries.alias_history import list_alias_promotions
    from reports.queries.display_tables import promotions_table
    from reports.queries.run_lookup import find_checkpoint

    views = list_alias_promotions(
        alias, offer_as_person(find_checkpoint(open_chosen_store(store), reference), alias, why=why)
    )[:1]
    print_document(views[0]) if json else print_rows(promotions_table(views))


def rollback(
    *, alias: AliasOption = "champion", why: WhyOption = "", store: StoreOption = "", json: JsonOption = False
) -> None:
    """Point an alias back at what it pointed at before, and record it; repeated, it goes one further back."""
    from cairn.cli.tables import print_rows
    from cairn.operations.alias_rollback import roll_back
    from flows.operations.promotion_by_person import this_person
    from reports.queries.display_tables import promotions_table

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
    from cairn.operations.text_sampling import end_interrupted, show_nothing, show_text, write_checkpoint
    from reports.queries.run_lookup import find_checkpoint

    try:
        prompt = read_prompt(options.prompt, options.prompt_file, sys.stdin.buffer)
        request = replace(options, prompt=prompt, prompt_file="")
        if follow:
            follow_run(open_chosen_store(store), reference, request, every_seconds=every, json=json)
            return ExitCode.DONE
        found = find_checkpoint(open_chosen_store(store), reference)
        written = write_checkpoint(found, request, show=show_nothing if json else show_text)
    except KeyboardInterrupt:
        return end_interrupted()
    if json:
        print_document(written[0] if request.count is None else written)
    return ExitCode.DONE


def export(reference: Reference, folder: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Write a committed checkpoint as a directory that `transformers` opens, with a model card about its origin.

    Args:
        folder: a new or empty folder; nothing is overwritten.
    """
    from pathlib import Path

    from cairn.operations.model_export import export_model
    from reports.queries.run_lookup import find_checkpoint

    written = export_model(find_checkpoint(open_chosen_store(store), reference), Path(folder))
    if json:
        print_document(written)
    else:
        for file in written.files:
            print_line(f"{Path(written.folder) / file.name}  {file.bytes:,} bytes")


MODEL_COMMANDS = (models, evaluate, promote, rollback, sample, export)
