"""The tables of all runs of a store; the rows of unchanged runs come from packs, a cache on this machine."""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from storage.errors import IntegrityError
from storage.logs.run_log import RunLog, run_prefix
from storage.logs.run_state import RunState
from storage.stores.object_store import ObjectStore
from storage.tables.table_index import Column, Pack, RunStamp, find_files, is_current, read_pack, stamp_run, write_pack

Given = TypeVar("Given")
Answer = TypeVar("Answer")
_RunRows = Mapping[str, Sequence[Any]]
PACKS = 32
"""Packs of one kind, over which the runs are spread: few files to read, and little to write where a run has moved."""
_READERS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TableKind:
    """Tables made together; packs of another `version` are not used, a run's rows `with_steps` have their own pack."""

    name: str
    version: str
    tables: Mapping[str, Sequence[Column]]
    make: Callable[[str, RunState], _RunRows]
    with_steps: bool = False

    def pack_of(self, run_id: str) -> str:
        """Return the name of the pack that has the rows of a run."""
        return run_id if self.with_steps else f"{crc32(run_id.encode()) % PACKS:02d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """A verified Parquet file with rows of one table."""

    table: str
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshTable:
    """Rows of one table that are in no file, as an Arrow table."""

    table: str
    rows: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadableRun:
    """A run whose log does not verify, and why."""

    run_id: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredTables:
    """All rows of the wanted tables."""

    files: tuple[TableFile, ...] = ()
    fresh: tuple[FreshTable, ...] = ()
    stamps: tuple[RunStamp, ...] = ()
    unreadable: tuple[UnreadableRun, ...] = ()


class TableCache:
    """The packs of a store."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        """Keep the packs in `folder`, which is of this store alone."""
        self._store, self._folder = store, folder

    def gather(self, kind: TableKind, run_ids: Sequence[str], wanted: Collection[str]) -> GatheredTables:
        """Return all rows of the `wanted` tables of these runs; raise `StoreUnavailable` if the store is away."""
        members = defaultdict[str, list[str]](list)
        for run_id in run_ids:
            members[kind.pack_of(run_id)].append(run_id)
        folder, here = self._folder / kind.name, set(run_ids)
        packs = {name: read_pack(folder / name, kind.version) for name in sorted(members)}
        stamps = [stamp for pack in packs.values() if pack for stamp in pack.runs if stamp.run_id in here]
        answers = self._each(lambda stamp: is_current(self._store, run_prefix(stamp.run_id), stamp), stamps)
        current = frozenset(stamp.run_id for stamp in compress(stamps, answers))
        gather_pack = partial(self._gather_pack, kind, current=current, wanted=wanted)
        found = [gather_pack(folder / name, pack, members[name]) for name, pack in packs.items()]
        with suppress(OSError):
            for name in set(os.listdir(folder)) - members.keys():
                shutil.rmtree(folder / name)
        names = [field.name for field in fields(GatheredTables)]
        return GatheredTables(**{name: tuple(chain(*(getattr(part, name) for part in found))) for name in names})

    def _gather_pack(
        self,
        kind: TableKind,
        folder: Path,
        pack: Pack | None,
        members: Sequence[str],
        *,
        current: frozenset[str],
        wanted: Collection[str],
    ) -> GatheredTables:
        """Return the rows of one pack's runs, the pack written again where its runs are others or one has moved."""
        has_moved = pack is None or not current.issuperset({*members, *(stamp.run_id for stamp in pack.runs)})
        files = find_files(folder, pack, kind.tables if has_moved else wanted) if pack else None
        kept = [stamp for stamp in pack.runs if stamp.run_id in current] if pack and files is not None else []
        known = {stamp.run_id for stamp in kept}
        folded = list(self._each(partial(self._fold, kind), [run_id for run_id in members if run_id not in known]))
        runs = [item for item in folded if isinstance(item, tuple)]
        stamps = (*kept, *(stamp for stamp, _ in runs))
        unreadable = tuple(item for item in folded if isinstance(item, UnreadableRun))
        fresh = dict[str, Any]()
        if runs or (pack is not None and len(kept) < len(pack.runs)):
            from storage.tables.table_pack import join_rows, write_tables  # Arrow loads slowly

            made = [rows for _, rows in runs]
            fresh = {table: join_rows(kind.tables[table], table, files or {}, known, made) for table in kind.tables}
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                pack = Pack(version=kind.version, tables=write_tables(folder, fresh), runs=stamps)
                write_pack(folder, pack)
                files, fresh = {item.table: folder / item.file_name for item in pack.tables}, {}
        return GatheredTables(
            files=tuple(TableFile(table=name, path=(files or {})[name]) for name in wanted if not fresh and files),
            fresh=tuple(FreshTable(table=name, rows=fresh[name]) for name in wanted if fresh),
            stamps=stamps,
            unreadable=unreadable,
        )

    def _fold(self, kind: TableKind, run_id: str) -> tuple[RunStamp, _RunRows] | UnreadableRun | None:
        """Return a run's rows with their stamp, or why its log does not verify; None if it has no log."""
        log = RunLog(self._store, run_id)
        try:
            log.refresh()
        except IntegrityError as error:
            return UnreadableRun(run_id=run_id, why=str(error))
        if log.folded is None:
            return None
        stamp = stamp_run(self._store, log.prefix, run_id, log.folded, with_steps=kind.with_steps)
        return stamp, kind.make(run_id, log.state)

    def _each(self, ask: Callable[[Given], Answer], items: Iterable[Given]) -> Iterator[Answer]:
        """Yield the answers in order, asking several at once unless the store is local."""
        if self._store.local_path("runs") is not None:
            yield from map(ask, items)
            return
        with ThreadPoolExecutor(_READERS) as readers:
            yield from readers.map(ask, items)
