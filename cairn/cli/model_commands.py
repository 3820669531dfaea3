"""The commands that use a trained model or a data snapshot: measure, promote, sample, import, export."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cairn.cli.app import Alias, Flag, Json, Reference, Seconds, SnapshotName, Url, Why, open_chosen_store
from cairn.cli.texts import note_no_runs, print_blocks
from cairn.operations.trained_models import RunSampler, SampleRequest, follow_run, read_prompt, show_text, write_samples
from cairn.reports.queries import alias_history, evaluations, run_lookup
from cairn.reports.text import answer_text, display_tables
from cairn.tasks.configuration.addresses import store_option
from cairn.tasks.machine.placement import work_folder
from cairn.tasks.policy.termination import ExitCode
from cairn.tasks.text import format, output

Form = Annotated[Literal["nanogpt", "llm.c"], Parameter(name="--format")]
TokenPaths = Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True, help="token files, in order")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFile:
    """A token file that was written, of so many tokens of type `dtype`."""

    path: str
    tokens: int
    dtype: str


def models(*, history: Flag = False, store: Url = "", json: Json = False) -> None:
    """Show the checkpoint of every alias, and those it can be rolled back to; a star marks the present one.

    Args:
        history: show every decision instead: promotions, also those gone back on, refusals with their gate, roll-backs.

    Examples:
        cairn models
        cairn models --history
    """
    read = alias_history.list_decisions if history else alias_history.list_promotions
    decisions = read(chosen := open_chosen_store(store))
    note_no_runs(chosen, decisions)
    output.print_document(decisions) if json else print_blocks(display_tables.decisions_table(decisions))


def evaluate(
    reference: Reference, *, suite: str = "", again: Flag = False, store: Url = "", json: Json = False
) -> ExitCode:
    """Evaluate a committed checkpoint in child processes, and compare it with others; nothing is trained.

    An evaluation on record is not repeated. Exit 1 if an evaluator failed, which is recorded too.

    Args:
        suite: a suite file (TOML), or the name of one in deployments/suites [the suites of the checkpoint's run].
        again: repeat evaluations that are on record, and add a second row.

    Examples:
        cairn evaluate champion
        cairn evaluate quickstart@400 --suite repetition
    """
    from cairn.flows.operations.checkpoint_operations import measure

    found = run_lookup.find_checkpoint(open_chosen_store(store), reference)
    view = evaluations.compare_evaluations(found, measure(found, suite=suite, again=again))
    output.print_document(view) if json else print_blocks(display_tables.comparison_table(view))
    return ExitCode.DONE if view.status == "recorded" else ExitCode.ERROR


def promote(
    reference: Reference, *, alias: Alias = "champion", why: Why = "", store: Url = "", json: Json = False
) -> None:
    """Offer a checkpoint to an alias: the gates decide and the decision is recorded; exit 3 is a refusal.

    If the run's configuration requires a person's approval, this command gives it.

    Examples:
        cairn promote quickstart
        cairn promote quickstart@400 --alias next --why "best of three"
    """
    from cairn.flows.operations.checkpoint_operations import offer_as_person

    state = offer_as_person(run_lookup.find_checkpoint(open_chosen_store(store), reference), alias, why=why)
    view = alias_history.list_alias_promotions(alias, state)[0]
    output.print_document(view) if json else print_blocks(display_tables.decisions_table([view]))


def rollback(*, alias: Alias = "champion", why: Why = "", store: Url = "", json: Json = False) -> None:
    """Point an alias back at its previous checkpoint, and record it; repeated, it goes one further back.

    Examples:
        cairn rollback
        cairn rollback --alias next --why "it repeats itself"
    """
    from cairn.operations.person_decisions import roll_back
    from cairn.tasks.machine.placement import this_person

    note_no_runs(chosen := open_chosen_store(store))
    view = roll_back(chosen, alias, by=this_person(), why=why)
    output.print_document(view) if json else print_blocks(display_tables.decisions_table([view]))


def sample(
    reference: Reference,
    *,
    options: Annotated[SampleRequest, Parameter(name="*")] = SampleRequest(),
    follow: Flag = False,
    every: Seconds = 2.0,
    store: Url = "",
    json: Json = False,
) -> ExitCode:
    """Generate text from a committed checkpoint; it is printed as it is drawn, and Ctrl-C ends it.

    The network sees at most a block of text; whenever that is full, it continues from the newest half of it.

    Args:
        follow: generate from the newest checkpoint of RUN, then from each new one, until the run has finished.
        every: seconds between two polls of --follow.

    Examples:
        cairn sample champion --prompt "Once "
        cairn sample quickstart@400 --tokens 500 --temperature 0.7
        cairn sample quickstart --follow
    """
    try:
        prompt = read_prompt(options.prompt, options.prompt_file, sys.stdin.buffer)
        request = replace(options, prompt=prompt, prompt_file="")
        if follow:
            follow_run(open_chosen_store(store), reference, request, every_seconds=every, json=json)
            return ExitCode.DONE
        found = run_lookup.find_checkpoint(open_chosen_store(store), reference)
        sampler = RunSampler(found.log, request)
        sampler.load(found.reference)
        written = write_samples(sampler, request, show=(lambda piece: None) if json else show_text)
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            show_text("\n")  # ends the line that Ctrl-C cut
        output.say("interrupted")
        return ExitCode.INTERRUPTED
    if json:
        output.print_document(written[0] if request.count is None else written)
    return ExitCode.DONE


def export(reference: Reference, folder: str, *, adapter: Flag = False, store: Url = "", json: Json = False) -> None:
    """Write a committed checkpoint as a directory that `transformers` opens, with a model card about its origin.

    Args:
        folder: a new or empty folder; nothing is overwritten.
        adapter: of a run with training.lora only the adapters, as peft opens them; else they are in the weights.

    Examples:
        cairn export champion ./model
        cairn export quickstart@400 ./model --json
    """
    from cairn.operations.trained_models import export_model

    found = run_lookup.find_checkpoint(open_chosen_store(store), reference)
    written = export_model(found, Path(folder), adapter=adapter)
    lines = (f"{Path(written.folder) / name}  {file.bytes:,} bytes" for name, file in written.files.items())
    output.print_document(written) if json else output.print_line("\n".join(lines))


def data(
    reference: SnapshotName,
    *,
    window: int | None = None,
    split: Literal["train", "val"] = "train",
    block_size: int = 0,
    store: Url = "",
    json: Json = False,
) -> None:
    """Show a data snapshot: sizes, sources, splits, tokenizer, left-out documents, and the origin of its text.

    Of a configuration (a path that ends in .toml) the first documents as they would be trained on, and what would be
    left out and where; the text is read once, nothing is written.

    Args:
        window: show this window and the documents it comes from; without it, a few windows.
        split: the side the window is counted in.
        block_size: tokens of a window [the run's, else 256].

    Examples:
        cairn data run.toml
        cairn data quickstart
        cairn data 0123abcd --window 17 --split val
    """
    from cairn.reports.queries import data_summary

    if reference.endswith(".toml"):
        from cairn.tasks.configuration.configuration_source import configuration_folder, read_configuration

        config = read_configuration(reference, overrides=(), environment=os.environ)
        preview = data_summary.preview_text(config.data, configuration_folder(reference))
        output.print_document(preview) if json else print_blocks(*answer_text.preview_blocks(preview))
        return
    choice = data_summary.WindowChoice(window=window, split=split, block_size=block_size)
    cache_dir = work_folder(os.environ) / "snapshots"
    view = data_summary.summarize_data(open_chosen_store(store), reference, choice, cache_dir=cache_dir)
    output.print_document(view) if json else print_blocks(*answer_text.data_blocks(view))


def import_tokens(
    *,
    train: TokenPaths,
    val: TokenPaths,
    tokenizer: str = "",
    vocab_size: int = 0,
    end_of_text: int = -1,
    dtype: Literal["uint16", "uint32", "uint64"] | None = None,
    allow_shared: Flag = False,
    store: Url = "",
    json: Json = False,
) -> None:
    """Make a data snapshot of token files (raw, .npy, llm.c, Megatron); every token is kept as it is.

    A document that Megatron's index ends without the end of text gets one, as its --append-eod would have given it.

    Args:
        tokenizer: the tokenizer.json that made the tokens.
        vocab_size: without a tokenizer: how many ids there are (50257 for GPT-2); text is then shown as numbers.
        end_of_text: the id that ends a document [the tokenizer's; 50256 of 50257 numbers].
        dtype: the type of the tokens in files that do not say it [uint16].
        allow_shared: import although train and val share documents.

    Examples:
        cairn import-tokens --train train.bin --val val.bin --vocab-size 50257
        cairn import-tokens --train a.bin b.bin --val c.bin --tokenizer tokenizer.json
    """
    from cairn.tasks.data import token_import

    chosen = open_chosen_store(store)
    meaning = token_import.given_tokenizer(tokenizer, vocab_size, end_of_text)
    files: token_import.TokenFiles = {"train": [*map(Path, train)], "val": [*map(Path, val)]}
    options = {"allow_shared": allow_shared}
    options["assumes_end"] = end_of_text < 0 and vocab_size not in (0, token_import.GPT2_VOCABULARY)
    made = token_import.import_tokens(chosen, files, meaning, dtype=dtype or "", **options)
    sizes = {"train": made.manifest.splits.train, "val": made.manifest.splits.val}
    lines = [f"{name}  {size.tokens:,} tokens in {size.documents:,} documents" for name, size in sizes.items()]
    show = f"show it: cairn data {format.short_digest(made.snapshot_id)}{store_option(store, os.environ)}"
    lines += [*made.notes, f"snapshot {made.snapshot_id}", show]
    output.print_document(made) if json else print_blocks(*lines)


def export_tokens(
    reference: SnapshotName, folder: str, *, form: Form = "nanogpt", store: Url = "", json: Json = False
) -> None:
    """Write a data snapshot's splits as token files another trainer reads; every shard is verified first.

    Args:
        folder: where the files go; nothing there is overwritten.
        form: nanogpt writes train.bin and val.bin, llm.c files with its header; uint32 above 65,536 ids.

    Examples:
        cairn export-tokens quickstart ./tokens
        cairn export-tokens 0123abcd ./tokens --format llm.c
    """
    from cairn.reports.queries.data_summary import find_snapshot
    from cairn.storage.snapshots.data_snapshot import SnapshotFiles
    from cairn.tasks.data import token_files, token_import

    chosen = open_chosen_store(store)
    files = SnapshotFiles(chosen, find_snapshot(chosen, reference).snapshot_id, work_folder(os.environ) / "snapshots")
    made = token_import.export_tokens(files, Path(folder), token_files.TokenFileFormat(form))
    written = tuple(ExportedFile(path=str(file.path), tokens=file.tokens, dtype=file.dtype.name) for file in made)
    lines = (f"{file.path}  {file.tokens:,} tokens, {file.dtype}" for file in written)
    output.print_document(written) if json else output.print_line("\n".join(lines))
