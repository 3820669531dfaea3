"""The tables of all runs of a store, without reading every log each time.

Rows of runs whose log has not moved come from packs; the others are folded, and packed once that is worth it. Owns
which packs are believed: those whose bytes have the digest the index names, for runs whose log still ends where it
ended. A pack is a cache, never a second truth: deleting or damaging one costs time. Packs lie in the store, where
readers share them, or in `spare` where the store may not be written. Refuses to know SQL.
"""

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from storage.errors import IntegrityError, StorageError
from storage.logs.entry_log import EntryLog
from storage.logs.fold_cache import FoldedLog, read_fold
from storage.logs.run_entries import RUN_KINDS
from storage.logs.run_log import RunLog, run_prefix
from storage.logs.run_state import RunState, fold
from storage.snapshots.snapshot_cache import SnapshotCache
from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import ExpectedObject, describe_file
from storage.tables.table_index import Pack, PackedTable, RunStamp, is_current, read_index, stamp_run, write_index

if TYPE_CHECKING:
    from storage.tables.table_pack import PackBuilder

Given = TypeVar("Given")
Answer = TypeVar("Answer")
WORTH_RUNS, WORTH_ROWS = 16, 2_000
FULL_ROWS = 200_000
MANY_PACKS = 16
_READERS = 32
_COPIES_BYTES = 20_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TableKind:
    """Tables that are made together: their names, and how a run's rows are made of its state."""

    name: str
    tables: tuple[str, ...]
    make: Callable[[str, RunState], Mapping[str, Sequence[Any]]]
    with_steps: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """A Parquet file with verified rows of a table; those of the runs in `without` are out of date."""

    table: str
    path: Path
    without: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshTable:
    """Rows of a table that no pack holds, as an Arrow table."""

    table: str
    rows: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadableRun:
    """A run whose log cannot be believed, and why."""

    run_id: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredTables:
    """All rows of the wanted tables; the files stay while `copies` is referred to."""

    parts: tuple[TablePart, ...]
    fresh: tuple[FreshTable, ...]
    stamps: tuple[RunStamp, ...]
    unreadable: tuple[UnreadableRun, ...]
    copies: SnapshotCache


@dataclass(frozen=True, kw_only=True, slots=True)
class _HeldPack:
    """A pack, the store it lies in, and which of its runs are up to date."""

    home: ObjectStore
    pack: Pack
    current: frozenset[str]
    paths: Mapping[str, Path]


class TableCache:
    """The packs of a store."""

    def __init__(self, store: ObjectStore, *, spare: ObjectStore, copies: Path) -> None:
        """Read runs of `store`; keep packs there or in `spare`, and copies of remote ones in the folder `copies`."""
        self._store, self._homes = store, (store, spare)
        self._copies = SnapshotCache(copies, limit_bytes=_COPIES_BYTES)

    def gather(self, kind: TableKind, run_ids: Sequence[str], wanted: Collection[str]) -> GatheredTables:
        """Return all rows of the `wanted` tables of these runs; raises `StoreUnavailable` where the store is away."""
        held = self._believed(kind, run_ids, wanted)
        known = {run_id for pack in held for run_id in pack.current}
        gathering = _Gathering(self, kind, wanted)
        gathering.fold([run_id for run_id in run_ids if run_id not in known])
        gathering.close(held)
        packs = [*held, *gathering.packed]
        stamps = [stamp for item in packs for stamp in item.pack.runs if stamp.run_id in item.current]
        return GatheredTables(
            parts=tuple(part for item in packs for part in _parts(item, wanted)),
            fresh=tuple(gathering.fresh),
            stamps=(*stamps, *gathering.stamps),
            unreadable=tuple(gathering.unreadable),
            copies=self._copies,
        )

    def _believed(self, kind: TableKind, run_ids: Sequence[str], wanted: Collection[str]) -> list[_HeldPack]:
        found = [(home, pack) for home in self._homes for pack in read_index(home, index_key(kind.name))]
        newest: dict[str, tuple[int, int]] = {}
        for number, (_, pack) in enumerate(found):
            for stamp in pack.runs:
                newest[stamp.run_id] = max(newest.get(stamp.run_id, (-1, -1)), (stamp.seq, number))
        here = set(run_ids)
        asked = [
            (number, stamp)
            for number, (_, pack) in enumerate(found)
            for stamp in pack.runs
            if stamp.run_id in here and newest[stamp.run_id] == (stamp.seq, number)
        ]
        answers = self.each(lambda ask: is_current(self._store, run_prefix(ask[1].run_id), ask[1]), asked)
        current: dict[int, set[str]] = {}
        for (number, stamp), answer in zip(asked, answers, strict=True):
            if answer:
                current.setdefault(number, set()).add(stamp.run_id)
        used = [(*found[number], frozenset(runs)) for number, runs in sorted(current.items())]
        held = [self.held(home, pack, runs, wanted) for home, pack, runs in used]
        return _without_crumbs([item for item in held if item is not None])

    def held(self, home: ObjectStore, pack: Pack, current: frozenset[str], wanted: Collection[str]) -> _HeldPack | None:
        """Return the pack with verified files of the wanted tables, or None where one is missing or damaged."""
        paths = {}
        for packed in pack.tables:
            if packed.table in wanted:
                path = self._verified(home, packed)
                if path is None:
                    return None
                paths[packed.table] = path
        return _HeldPack(home=home, pack=pack, current=current, paths=paths)

    def _verified(self, home: ObjectStore, packed: PackedTable) -> Path | None:
        with suppress(StorageError, OSError):
            path = home.local_path(packed.key)
            if path is None:
                promised = ExpectedObject(key=packed.key, bytes=packed.bytes, sha256=packed.sha256)
                return self._copies.fetch(home, promised)
            found = describe_file(path)
            return path if (found.bytes, found.sha256) == (packed.bytes, packed.sha256) else None
        return None

    def read(self, run_id: str) -> FoldedLog | UnreadableRun | None:
        """Return what a run's log folds to, or why it cannot be believed; None where there is no log."""
        prefix, key = run_prefix(run_id), RunLog(self._store, run_id).fold_key
        log = EntryLog(store=self._store, prefix=f"{prefix}/log", kinds=RUN_KINDS)
        try:
            cached = read_fold(self._store, key, log)
            head, state = (cached.head, cached.state) if cached else (None, RunState())
            for read in log.walk_after(head):
                head, state = read, fold([read.entry], state)
        except IntegrityError as error:
            return UnreadableRun(run_id=run_id, why=str(error))
        return None if head is None else FoldedLog(head=head, state=state)

    def make(self, kind: TableKind, run_id: str) -> "_MadeRun | UnreadableRun | None":
        """Return a run's rows with their stamp, or why there are none."""
        folded = self.read(run_id)
        if not isinstance(folded, FoldedLog):
            return folded
        stamp = stamp_run(self._store, run_prefix(run_id), run_id, folded, with_steps=kind.with_steps)
        return _MadeRun(stamp=stamp, rows=kind.make(run_id, folded.state))

    def publish(self, kind: TableKind, builder: "PackBuilder", wanted: Collection[str]) -> _HeldPack | None:
        """Write a pack where that is possible; None where neither home can be written."""
        for home in self._homes:
            with suppress(StorageError, OSError), tempfile.TemporaryDirectory() as spool:
                pack = builder.publish(home, _folder(kind.name), spool=Path(spool))
                current = frozenset(stamp.run_id for stamp in pack.runs)
                if held := self.held(home, pack, current, wanted):
                    return held
        return None

    def list_packs(self, kind: TableKind, packs: Sequence[_HeldPack]) -> None:
        """Make the indexes name these packs, and delete what neither they nor the indexes before named.

        What the index named until now may be under the eyes of a reader; it goes the next time.
        """
        for home in {id(item.home): item.home for item in packs}.values():
            mine = tuple(item.pack for item in packs if item.home is home)
            with suppress(StorageError):
                before = read_index(home, index_key(kind.name))
                write_index(home, index_key(kind.name), mine)
                named = {packed.key for pack in (*before, *mine) for packed in pack.tables}
                for key in set(home.keys(_folder(kind.name))) - named:
                    home.delete(key)

    def each(self, ask: Callable[[Given], Answer], items: Iterable[Given]) -> Iterator[Answer]:
        """Yield the answers in order; several are asked for at once where the store is far."""
        if self._store.local_path("runs") is not None:
            yield from map(ask, items)
            return
        with ThreadPoolExecutor(_READERS) as readers:
            yield from readers.map(ask, items)


@dataclass(frozen=True, kw_only=True, slots=True)
class _MadeRun:
    stamp: RunStamp
    rows: Mapping[str, Sequence[Any]]


class _Gathering:
    """Runs that are folded for one question: packed where that is worth it, else kept in memory."""

    def __init__(self, cache: TableCache, kind: TableKind, wanted: Collection[str]) -> None:
        self._cache, self._kind, self._wanted = cache, kind, wanted
        self._builder: PackBuilder | None = None
        self.packed: list[_HeldPack] = []
        self.fresh: list[FreshTable] = []
        self.stamps: list[RunStamp] = []
        self.unreadable: list[UnreadableRun] = []

    def fold(self, run_ids: Sequence[str]) -> None:
        """Fold these runs, a few at a time, so that memory does not grow with their number."""
        for start in range(0, len(run_ids), _READERS):
            some = run_ids[start : start + _READERS]
            for made in self._cache.each(lambda run_id: self._cache.make(self._kind, run_id), some):
                if isinstance(made, UnreadableRun):
                    self.unreadable.append(made)
                elif made is not None:
                    self._add(made)

    def close(self, held: Sequence[_HeldPack]) -> None:
        """Pack or keep what is left, and list the packs there are now where that is news."""
        builder = self._builder
        if builder is not None and (len(builder.stamps) >= WORTH_RUNS or builder.rows >= WORTH_ROWS):
            self._pack(builder)
        elif builder is not None:
            self._keep(builder)
        if self.packed:
            self._cache.list_packs(self._kind, [*held, *self.packed])

    def _add(self, made: _MadeRun) -> None:
        from storage.tables.table_pack import PackBuilder  # Arrow: only what is not packed pays for it

        builder = self._builder = self._builder or PackBuilder(self._kind.tables)
        builder.add(made.stamp, made.rows)
        if builder.rows >= FULL_ROWS:
            self._pack(builder)

    def _pack(self, builder: "PackBuilder") -> None:
        held = self._cache.publish(self._kind, builder, self._wanted)
        if held is None:
            self._keep(builder)
        else:
            self.packed.append(held)
        self._builder = None

    def _keep(self, builder: "PackBuilder") -> None:
        self.stamps += builder.stamps
        self.fresh += [FreshTable(table=table, rows=builder.arrow(table)) for table in self._wanted]


def index_key(kind: str) -> str:
    """Return the key of the index of a kind of tables."""
    return f"tables/{kind}.json"


def _folder(kind: str) -> str:
    return f"tables/{kind}"


def _parts(item: _HeldPack, wanted: Collection[str]) -> Iterator[TablePart]:
    without = tuple(sorted({stamp.run_id for stamp in item.pack.runs} - item.current))
    for table in wanted:
        yield TablePart(table=table, path=item.paths[table], without=without)


def _without_crumbs(held: list[_HeldPack]) -> list[_HeldPack]:
    """Leave out packs that are mostly out of date, and small ones where there are many: they are made anew."""
    sound = [item for item in held if 2 * len(item.current) >= len(item.pack.runs)]
    big = [item for item in sound if 4 * item.pack.rows >= FULL_ROWS]
    return sound if len(sound) - len(big) <= MANY_PACKS else big
