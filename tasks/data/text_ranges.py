"""The ranges of a text that machines tokenize apart; a build takes their parts from the store as if they were its own.

A range is consecutive files, of 64 MiB or one alone. Its borders depend on names and sizes, and its id on all that
decides its tokens: a build need not know how many machines worked, and a machine need not read the files of others.
"""

import logging
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as compute

from cairn.model.configuration.data import DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.storage.errors import IntegrityError
from cairn.storage.snapshots import data_snapshot, token_shard
from cairn.storage.stores import object_store
from cairn.tasks.data import rejection, snapshot_writer
from cairn.tasks.data.document import DUPLICATE_DETAIL, Source, short_hash
from cairn.tasks.data.snapshot_lookup import make_recipe, recipe_id

_LEAST_RANGES = 64
"""A text of many files has so many ranges, however small it is: there is something for each machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRange:
    """Consecutive sources, the id of their parts, and the parts in the store; None if they are no whole there."""

    sources: tuple[Source, ...]
    id: str
    parts: tuple[object_store.ExpectedObject, ...] | None = None


def cut_ranges(sources: Sequence[Source]) -> dict[int, list[Source]]:
    """Return sources, which need not be checked, by the number of the stretch of the text in which they begin."""
    *starts, total_bytes = accumulate((source.bytes for source in sources), initial=0)
    stretch_bytes = max(1, min(snapshot_writer.PART_BYTES, total_bytes // _LEAST_RANGES))
    ranges = dict[int, list[Source]]()
    for start, source in zip(starts, sources, strict=True):
        ranges.setdefault(start // stretch_bytes, []).append(source)
    return ranges


def choose_ranges(sources: Sequence[Source], part: int, of: int) -> list[list[Source]]:
    """Return the ranges of one part of a text, 1 to `of`."""
    ranges = cut_ranges(sources)
    return [files for number, files in ranges.items() if number * of // (max(ranges) + 1) == part - 1]


def parts_id(data: DataConfig, sources: Sequence[Source], tokenizer: Tokenizer | None) -> str:
    """Return the id of the parts of these sources: the hash of their own recipe."""
    return recipe_id({**make_recipe(data, sources, tokenizer), "parts": 1})  # increase it when their rows change


def find_ranges(
    store: object_store.ObjectStore, data: DataConfig, sources: tuple[Source, ...], tokenizer: Tokenizer | None
) -> list[TextRange]:
    """Return the ranges of a corpus; all of it as one if the store has parts of none."""
    ranges = list(cut_ranges(sources).values()) if tokenizer else []
    ids = [parts_id(data, one, tokenizer) for one in ranges]
    parts = list(object_store.ask_each(store, lambda one: data_snapshot.find_parts(store, one), ids))
    if all(found is None for found in parts):
        return [TextRange(sources=sources, id=parts_id(data, sources, tokenizer))]
    return [TextRange(sources=tuple(one), id=i, parts=found) for one, i, found in zip(ranges, ids, parts, strict=True)]


def fetch_range(store: object_store.ObjectStore, one: TextRange, folder: Path, schema: pa.Schema) -> bool:
    """Copy the parts of a range into a new folder; returns False after those that are sound if one is not."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    copy = folder / "part.copy"
    try:
        for number, part in enumerate(one.parts or ()):
            object_store.save_verified(store, part, copy)
            deque(token_shard.read_batches(copy, schema, where=part.key), maxlen=0)
            copy.replace(snapshot_writer.part_path(folder, number))
    except IntegrityError as error:
        logging.getLogger(__name__).warning("%s: its text is tokenized again", error)
        return False
    return True


def without_duplicates(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ranges with each document rejected that has the text of an earlier one."""
    first, numbers, kind = dict[bytes, int](), count(), str(rejection.RejectionKind.DUPLICATE)
    values: dict[str, Any] = {"bytes": 0, "unknown": 0, "ends": False, "split": None, "sha256": None, "kind": kind}
    values |= {"ids": [], "answers": []}
    for batch in batches:
        digests = zip(batch.column("sha256").to_pylist(), numbers, strict=False)
        is_kept = pa.array([not one or first.setdefault(short_hash(one), number) == number for one, number in digests])
        found = values.keys() & {*batch.schema.names}
        others = {name: pa.scalar(values[name], batch.schema.field(name).type) for name in found}
        others["detail"] = compute.binary_join_element_wise(DUPLICATE_DETAIL, batch.column("sha256"), "")
        columns = {name: batch.column(name) for name in batch.schema.names}
        columns |= {name: compute.if_else(is_kept, columns[name], other) for name, other in others.items()}
        yield pa.record_batch(list(columns.values()), schema=batch.schema)
