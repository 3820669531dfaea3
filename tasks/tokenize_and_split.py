"""The step `tokenize-and-split`: builds the data snapshot that a run trains on; `tokenize-part` does a part of it.

A part is tokenized into the store, for the build of its snapshot. It can be killed anywhere, repeated, and done by two
machines at once.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from prefect import task

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots import data_snapshot
from cairn.storage.stores import codec
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.data import corpus, snapshot_build, snapshot_lookup, snapshot_writer, text_ranges
from cairn.tasks.data.document import InvalidCorpus


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """The text of a run: relative paths of `data` start at `base_dir`; a killed build continues from `cache_dir`."""

    data: DataConfig
    base_dir: Path
    cache_dir: Path

    def __str__(self) -> str:
        return ""  # a run has one text: its step needs no other name


@task(name="tokenize-and-split", task_run_name="tokenize-and-split", persist_result=False)
def tokenize_and_split(
    text: Text, store: ObjectStore, on_progress: snapshot_build.ProgressListener = lambda progress: None
) -> snapshot_lookup.SnapshotReference:
    """Return the text's data snapshot, building it unless the store has one of the same recipe.

    Raises InvalidCorpus for text or settings that cannot be used.
    """
    return snapshot_build.build_snapshot(
        store, text.data, text.base_dir, cache_dir=text.cache_dir, on_progress=on_progress
    )


@task(name="tokenize-part", task_run_name="tokenize-part {part} of {of}", persist_result=False)
def tokenize_part(part: int, of: int, data: DataConfig, base_dir: Path, cache_dir: Path, store: ObjectStore) -> str:
    """Tokenize the ranges of part 1 to `of` of a text that are not intact in the store; returns how many they are.

    Relative paths of `data` start at `base_dir`; a killed process goes on from `cache_dir`. Raises InvalidCorpus.
    """
    if part > of:
        raise InvalidCorpus(f"part = {part}: rule: from 1 to the number of parts, of = {of}")
    if (tokenizer := snapshot_build.given_tokenizer(data, base_dir)) is None:
        rule = "parts need a tokenizer that is there. Train once on a few of the files, and name its tokenizer.json"
        raise InvalidCorpus(f"data.tokenizer = {data.tokenizer!r}: is learned from all of the text; rule: {rule}")
    chosen = text_ranges.choose_ranges(corpus.find_sources(data, base_dir), part, of)
    ranges = {text_ranges.parts_id(data, sources, tokenizer): sources for sources in map(corpus.check_sources, chosen)}
    missing = {one: sources for one, sources in ranges.items() if not data_snapshot.has_parts(store, one)}
    files = [source for sources in missing.values() for source in sources]
    with snapshot_build.build_folder(cache_dir, codec.sha256("".join(ranges).encode())) as folder:
        try:
            snapshot_build.accelerate(tokenizer, files, sum(source.bytes for source in files))
            encoder = snapshot_writer.PartEncoder(tokenizer=tokenizer, data=data)
            for one, sources in missing.items():
                snapshot_writer.complete_parts(folder / one, sources, encoder)
                data_snapshot.publish_parts(store, one, sorted((folder / one).glob("part-*.arrow")))
                shutil.rmtree(folder / one)
        finally:
            tokenizer.slow_down()
    return f"part {part} of {of}: {len(ranges)} ranges of files, {len(ranges) - len(missing)} of which were there"
