"""The tables of all runs of a store, without reading every log each time.

Rows of unchanged runs come from packs, a cache on this machine; other runs are folded, and packed when there are enough
of them. The store is only read.
"""

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from storage.errors import IntegrityError, StorageError
from storage.logs.run_log import RunLog, run_prefix
from storage.logs.run_state import RunState
from storage.stores.document import project
from storage.stores.local_store import LocalStore
from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import ExpectedObject, check_object
from storage.tables.table_index import Column, Pack, RunStamp, is_current, read_index, stamp_run, write_index

if TYPE_CHECKING:
    from storage.tables.table_pack import PackBuilder

Given = TypeVar("Given")
Answer = TypeVar("Answer")
_RunRows = Mapping[str, Sequence[Any]]
WORTH_RUNS, WORTH_ROWS = 16, 2_000
FULL_ROWS = 200_000
MANY_PACKS = 16
_READERS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TableKind:
    """Tables made together: their columns, and a run's rows by its state. Packs of another `version` are not used."""

    name: str
    version: str
    tables: Mapping[str, Sequence[Column]]
    make: Callable[[str, RunState], _RunRows]
    with_steps: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """A verified Parquet file with rows of one table; the rows of the runs in `without` are out of date."""

    table: str
    path: Path
    without: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshTable:
    """Rows of one table that are in no pack, as an Arrow table."""

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

    parts: tuple[TablePart, ...]
    fresh: tuple[FreshTable, ...]
    stamps: tuple[RunStamp, ...]
    unreadable: tuple[UnreadableRun, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _UsablePack:
    """A pack with verified files, and the runs whose rows in it are current."""

    pack: Pack
    current: frozenset[str]
    paths: Mapping[str, Path]

    def parts(self) -> Iterator[TablePart]:
        without = tuple(sorted({stamp.run_id for stamp in self.pack.runs} - self.current))
        for table, path in self.paths.items():
            yield TablePart(table=table, path=path, without=without)


class TableCache:
    """The packs of a store."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        """Keep the packs in `folder`, which is of this store alone."""
        self._store, self._folder, self._packs = store, folder, LocalStore(folder)

    def gather(self, kind: TableKind, run_ids: Sequence[str], wanted: Collection[str]) -> GatheredTables:
        """Return all rows of the `wanted` tables of these runs; raise `StoreUnavailable` if the store is away."""
        old = self._usable_packs(kind, run_ids, wanted)
        known = {run_id for pack in old for run_id in pack.current}
        gathering = _Gathering(self, kind, wanted)
        gathering.fold([run_id for run_id in run_ids if run_id not in known])
        gathering.close(old)
        packs = [*old, *gathering.packed]
        stamps = [stamp for item in packs for stamp in item.pack.runs if stamp.run_id in item.current]
        return GatheredTables(
            parts=tuple(part for item in packs for part in item.parts()),
            fresh=tuple(gathering.fresh),
            stamps=(*stamps, *gathering.stamps),
            unreadable=tuple(gathering.unreadable),
        )

    def _usable_packs(self, kind: TableKind, run_ids: Sequence[str], wanted: Collection[str]) -> list[_UsablePack]:
        found = read_index(self._packs, index_key(kind.name), kind.version)
        stamped = [(number, stamp) for number, pack in enumerate(found) for stamp in pack.runs]
        newest: dict[str, tuple[int, int]] = {}
        for number, stamp in stamped:
            newest[stamp.run_id] = max(newest.get(stamp.run_id, (-1, -1)), (stamp.seq, number))
        here = set(run_ids)
        asked = [(n, stamp) for n, stamp in stamped if stamp.run_id in here and newest[stamp.run_id] == (stamp.seq, n)]
        answers = self.each(lambda ask: is_current(self._store, run_prefix(ask[1].run_id), ask[1]), asked)
        current: dict[int, set[str]] = {}
        for (number, stamp), answer in zip(asked, answers, strict=True):
            if answer:
                current.setdefault(number, set()).add(stamp.run_id)
        packs = [self._open_pack(found[number], frozenset(runs), wanted) for number, runs in sorted(current.items())]
        # Leave out packs that are mostly out of date, and small ones when there are many: their runs are packed again.
        usable = [item for item in packs if item is not None and 2 * len(item.current) >= len(item.pack.runs)]
        big = [item for item in usable if 4 * item.pack.rows >= FULL_ROWS]
        return usable if len(usable) - len(big) <= MANY_PACKS else big

    def _open_pack(self, pack: Pack, current: frozenset[str], wanted: Collection[str]) -> _UsablePack | None:
        paths = {}
        for packed in pack.tables:
            if packed.table in wanted:
                try:
                    check_object(self._packs, project(packed, ExpectedObject))
                except (StorageError, OSError):
                    return None
                paths[packed.table] = self._folder / packed.key
        return _UsablePack(pack=pack, current=current, paths=paths)

    def fold_run(self, kind: TableKind, run_id: str) -> tuple[RunStamp, _RunRows] | UnreadableRun | None:
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

    def publish(self, kind: TableKind, builder: "PackBuilder", wanted: Collection[str]) -> _UsablePack | None:
        """Write a pack; None if the folder cannot be written."""
        with suppress(StorageError, OSError), tempfile.TemporaryDirectory() as spool:
            pack = builder.publish(self._packs, kind.name, spool=Path(spool))
            return self._open_pack(pack, frozenset(stamp.run_id for stamp in pack.runs), wanted)
        return None

    def list_packs(self, kind: TableKind, packs: Sequence[_UsablePack]) -> None:
        """Name these packs in the index; delete those in neither the old, which readers may use, nor the new."""
        with suppress(StorageError):
            before, now = (
                read_index(self._packs, index_key(kind.name), kind.version),
                tuple(item.pack for item in packs),
            )
            write_index(self._packs, index_key(kind.name), kind.version, now)
            named = {packed.key for pack in (*before, *now) for packed in pack.tables}
            for key in set(self._packs.keys(kind.name)) - named:
                self._packs.delete(key)

    def each(self, ask: Callable[[Given], Answer], items: Iterable[Given]) -> Iterator[Answer]:
        """Yield the answers in order, asking several at once unless the store is local."""
        if self._store.local_path("runs") is not None:
            yield from map(ask, items)
            return
        with ThreadPoolExecutor(_READERS) as readers:
            yield from readers.map(ask, items)


class _Gathering:
    """Folds runs for one query; their rows are packed if there are enough of them, else kept in memory."""

    def __init__(self, cache: TableCache, kind: TableKind, wanted: Collection[str]) -> None:
        self._cache, self._kind, self._wanted = cache, kind, wanted
        self._builder: PackBuilder | None = None
        self.packed: list[_UsablePack] = []
        self.fresh: list[FreshTable] = []
        self.stamps: list[RunStamp] = []
        self.unreadable: list[UnreadableRun] = []

    def fold(self, run_ids: Sequence[str]) -> None:
        """Fold these runs, a few at a time, so that memory does not grow with their number."""
        for start in range(0, len(run_ids), _READERS):
            some = run_ids[start : start + _READERS]
            for folded in self._cache.each(lambda run_id: self._cache.fold_run(self._kind, run_id), some):
                if isinstance(folded, UnreadableRun):
                    self.unreadable.append(folded)
                elif folded is not None:
                    self._add(*folded)

    def close(self, old: Sequence[_UsablePack]) -> None:
        """Pack or keep the remaining rows, and update the indexes if there are new packs."""
        builder = self._builder
        if builder is not None and (len(builder.stamps) >= WORTH_RUNS or builder.rows >= WORTH_ROWS):
            self._pack(builder)
        elif builder is not None:
            self._keep(builder)
        if self.packed:
            self._cache.list_packs(self._kind, [*old, *self.packed])

    def _add(self, stamp: RunStamp, rows: _RunRows) -> None:
        from storage.tables.table_pack import PackBuilder  # Arrow loads slowly: only runs without a pack need it

        builder = self._builder = self._builder or PackBuilder(self._kind.tables)
        builder.add(stamp, rows)
        if builder.rows >= FULL_ROWS:
            self._pack(builder)

    def _pack(self, builder: "PackBuilder") -> None:
        pack = self._cache.publish(self._kind, builder, self._wanted)
        if pack is None:
            self._keep(builder)
        else:
            self.packed.append(pack)
        self._builder = None

    def _keep(self, builder: "PackBuilder") -> None:
        self.stamps += builder.stamps
        self.fresh += [FreshTable(table=table, rows=builder.arrow(table)) for table in self._wanted]


def index_key(kind: str) -> str:
    """Return the key of the index of a kind of tables."""
    return f"{kind}.json"
