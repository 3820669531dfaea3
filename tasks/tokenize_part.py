"""The step `tokenize-part`: tokenizes one machine's part of a text into the store, for the build of its snapshot.

It can be killed anywhere, repeated, and done by two machines at once.
"""

import shutil
from pathlib import Path

from prefect import task

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots import data_snapshot
from cairn.storage.stores import codec
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.data import corpus, snapshot_build, snapshot_writer, text_ranges
from cairn.tasks.data.document import InvalidCorpus


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
