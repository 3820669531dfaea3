"""The model registry: each alias, such as `champion`, is a log of decisions with its own cached fold."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import reduce
from typing import Any

from cairn.storage.logs import fold_cache, log_entry
from cairn.storage.stores import object_store


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteReference:
    """A suite: its display name and its identity."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricDifference:
    """How much better than the champion's `before` a metric of a suite is: one standard error, None if not known."""

    suite_sha256: str
    metric: str
    value: float
    before: float
    better_by: float
    error: float | None

    def __str__(self) -> str:
        """Return it in words."""
        words = f"{'better' if self.better_by > 0 else 'worse'} by {abs(self.better_by):.4f}"
        return f"{words}, no error is known" if self.error is None else f"{words} ± {self.error:.4f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Promoted:
    """An alias now points at these weights, and why.

    `suite_sha256`, `data_snapshot` and `metrics` are the compared evaluation, `required` the suites under which the
    weights had to be evaluated, `verdict` the verdict on the loss curve, `differences` those of the gates' metrics from
    the champion before, that of the held-out loss first.
    """

    alias: str
    run_id: str
    step: int
    prefix: str
    manifest_sha256: str
    suite_sha256: str
    metrics: Mapping[str, float]
    by: str
    why: str
    previous: str | None
    pin_id: str | None = None
    data_snapshot: str
    required: tuple[SuiteReference, ...] = ()
    verdict: str | None = None
    differences: tuple[MetricDifference, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A promotion that a gate refused, with the values it was refused for; the alias did not change."""

    alias: str
    run_id: str
    step: int
    manifest_sha256: str
    gate: str
    detail: str
    by: str
    pin_id: str | None = None
    why: str = ""
    suite_sha256: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    differences: tuple[MetricDifference, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    """An alias went back to an earlier promotion; `left_manifest_sha256` is what it pointed at until then."""

    alias: str
    manifest_sha256: str | None
    by: str
    why: str
    left_manifest_sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdrawn:
    """A run is being deleted: the alias can no longer be rolled back to its weights. Its present target stays."""

    alias: str
    run_id: str
    by: str
    why: str


MODEL_KINDS: Mapping[str, type] = {
    "promoted": Promoted,
    "refused": Refused,
    "rolled-back": RolledBack,
    "withdrawn": Withdrawn,
}
ModelDecision = Promoted | Refused | RolledBack | Withdrawn
FOLD_EVERY_ENTRIES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DatedDecision:
    """A decision and its time, as which it can be unpacked; one of the four is set, because a union has no JSON."""

    at: datetime
    promoted: Promoted | None = None
    refused: Refused | None = None
    rolled_back: RolledBack | None = None
    withdrawn: Withdrawn | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.at, self.promoted or self.refused or self.rolled_back or self.withdrawn))


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryState:
    """The state of an alias; everything is oldest first.

    `champions` are the promotions in force: the last is current, the others are what rollbacks would go back to.
    `history` is every decision; `decided_pins` are the ids of the pins that were decided on. A sweep needs only these
    ids and `reached`, the manifests of the champions (sha256): they are always in memory.
    """

    champions: fold_cache.History[tuple[datetime, Promoted]] = field(default_factory=fold_cache.History)
    history: fold_cache.History[DatedDecision] = field(default_factory=fold_cache.History)
    reached: tuple[str, ...] = ()
    decided_pins: tuple[str, ...] = ()
    newer: log_entry.NewerEntry | None = None

    @property
    def champion(self) -> Promoted | None:
        """The current promotion, or None."""
        return self.champions[-1][1] if self.champions else None

    def closed_to_writers(self) -> str:
        """Return why this program may not append here, nor delete what the alias might need; empty if it may."""
        return log_entry.describe_newer(self.newer)


class Registry(fold_cache.LogFold[RegistryState]):
    """The log of one alias with its folded state; nothing is read before `refresh`."""

    def __init__(self, store: object_store.ObjectStore, alias: str, *, log: log_entry.EntryLog | None = None) -> None:
        self.alias, prefix = alias, object_store.check_key(f"models/{object_store.check_name('alias', alias)}/log")
        log = log or log_entry.EntryLog(store=store, prefix=prefix, kinds=MODEL_KINDS)
        super().__init__(log, f"models/{alias}", fold_decisions, cache_every=FOLD_EVERY_ENTRIES)

    def append(self, decide: Callable[[RegistryState], ModelDecision | None]) -> RegistryState:
        """Append what `decide` returns for the newest state, and call it again each time a race is lost."""
        while True:
            log_entry.refuse_old_writer(self.refresh_whole().closed_to_writers(), f"alias {self.alias}")
            if (body := decide(self.state)) is None:
                return self.state
            if (read := self._log.append(body, after=self.head, writer=log_entry.this_writer())) is not None:
                self._accept(read)
                self.cache()
                return self.state


def list_aliases(store: object_store.ObjectStore) -> list[str]:
    """Return the store's aliases, sorted."""
    return [key.split("/")[1] for key in store.folders("models")]


def fold_decisions(entries: Iterable[log_entry.Entry], state: RegistryState | None = None) -> RegistryState:
    """Return the state of an alias after `entries`, starting from `state` or from an empty log."""
    return reduce(_apply, entries, state or RegistryState())


def _apply(state: RegistryState, entry: log_entry.Entry) -> RegistryState:
    at, champions, reached, decided = entry.at, state.champions, state.reached, state.decided_pins
    match body := entry.body:
        case Promoted():
            decision = DatedDecision(at=at, promoted=body)
            champions, reached = champions.append((at, body)), (*reached, body.manifest_sha256)
        case Refused():
            decision = DatedDecision(at=at, refused=body)
        case RolledBack():  # the promotions between the newest and the named one cannot be read any more
            decision, left = DatedDecision(at=at, rolled_back=body), max(len(reached) - 1, 0)
            while left and reached[left - 1] != body.manifest_sha256:
                left -= 1
            champions, reached = champions.cut(left), reached[:left]
        case Withdrawn():
            decision, current, gone = DatedDecision(at=at, withdrawn=body), state.champion, body.run_id
            champions = fold_cache.History(item for item in champions if item[1] is current or item[1].run_id != gone)
            reached = tuple(promoted.manifest_sha256 for _, promoted in champions)
        case _:
            newer = log_entry.NewerEntry(seq=entry.seq, kind=entry.kind, version=entry.version)
            return state if state.newer else replace(state, newer=newer)
    if isinstance(body, Promoted | Refused) and body.pin_id:
        decided = (*decided, body.pin_id)
    history = state.history.append(decision)
    return replace(state, champions=champions, history=history, reached=reached, decided_pins=decided)
