"""The commands about data snapshots: `data`, `import-tokens`, `export-tokens`."""

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cairn.cli.options import Flag, JsonOption, SnapshotReference, StoreOption, open_chosen_store
from cairn.cli.tables import print_data, print_import
from tasks.text.output import print_document, print_line

TokenPaths = Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True, help=".bin files, in order")]


def data(
    reference: SnapshotReference,
    *,
    window: int | None = None,
    split: Literal["train", "val"] = "train",
    block_size: int = 0,
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Show what a data snapshot holds: sizes, sources, splits, tokenizer, what was left out, and where text comes from.

    Args:
        window: show this window and the documents it comes from; without it, a few windows.
        split: the side the window is counted in.
        block_size: tokens of a window [the run's, else 256].
    """
    from reports.queries.data_summary import WindowChoice, summarize_data
    from tasks.machine.placement import work_folder

    choice = WindowChoice(window=window, split=split, block_size=block_size)
    view = summarize_data(open_chosen_store(store), reference, choice, cache_dir=work_folder(os.environ) / "snapshots")
    print_document(view) if json else print_data(view)


def import_tokens(
    *,
    train: TokenPaths,
    val: TokenPaths,
    tokenizer: str = "",
    vocab_size: int = 0,
    end_of_text: int = -1,
    allow_shared: Flag = False,
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
    from cairn.cli.finished_run_text import store_option
    from cairn.operations.token_files import import_snapshot
    from tasks.data.token_import import TokenFiles, given_tokenizer

    chosen = open_chosen_store(store)
    meaning = given_tokenizer(tokenizer, vocab_size, end_of_text)
    files = TokenFiles(train=tuple(map(Path, train)), val=tuple(map(Path, val)))
    found = import_snapshot(chosen, files, meaning, allow_shared=allow_shared)
    print_document(found) if json else print_import(found, store_option(store, os.environ))


def export_tokens(
    reference: SnapshotReference,
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
    from cairn.operations.token_files import export_snapshot

    written = export_snapshot(open_chosen_store(store), reference, folder, form)
    if json:
        print_document(written)
    else:
        for file in written:
            print_line(f"{file.path}  {file.tokens:,} tokens")
