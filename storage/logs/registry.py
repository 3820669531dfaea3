"""The model registry: each alias, such as `champion`, is a log of decisions with its own fold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from storage.logs.entry_log import EntryLog, ReadEntry, this_writer
from storage.logs.log_entry import Entry, NewerEntry, newer_entry, refuse_old_writer, told_newer
from storage.stores.object_store import ObjectStore, check_key


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteReference:
    """A suite: its display name and its identity."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Promoted:
    """An alias now points at these weights, and why.

    `suite_sha256`, `data_snapshot` and `metrics` are the compared evaluation, `required` the suites under which the
    weights had to be evaluated, `verdict` the verdict on the loss curve.
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
    hold_id: str | None = None
    data_snapshot: str
    required: tuple[SuiteReference, ...] = ()
    verdict: str | None = None


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
    hold_id: str | None = None
    why: str = ""
    suite_sha256: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    """An alias went back to an earlier promotion; `left_manifest_sha256` is what it pointed at until then."""

    alias: str
    manifest_sha256: str | None
    by: str
    why: str
    left_manifest_sha256: str | None = None


MODEL_KINDS: Mapping[str, type] = {"promoted": Promoted, "refused": Refused, "rolled-back": RolledBack}
ModelDecision = Promoted | Refused | RolledBack


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryState:
    """The state of an alias; all tuples are oldest first.

    `champions` are the promotions in force: the last is current, the others are what rollbacks would go back to.
    `history` is every decision; `decided_pins` are the ids of the pins that were decided on.
    """

    champions: tuple[tuple[datetime, Promoted], ...] = ()
    history: tuple[tuple[datetime, ModelDecision], ...] = ()
    decided_pins: frozenset[str] = frozenset()
    newer: NewerEntry | None = None

    @property
    def champion(self) -> Promoted | None:
        """The current promotion, or None."""
        return self.champions[-1][1] if self.champions else None

    def closed_to_writers(self) -> str:
        """Return why this program may not append here, nor delete what the alias might need; empty if it may."""
        return told_newer(self.newer) if self.newer else ""

    @property
    def refusals(self) -> tuple[tuple[datetime, Refused], ...]:
        """Every refusal, oldest first."""
        return tuple((at, body) for at, body in self.history if isinstance(body, Refused))


class Registry:
    """The log of one alias with its folded state; nothing is read before `refresh`."""

    def __init__(self, store: ObjectStore, alias: str, *, log: EntryLog | None = None) -> None:
        self.alias = alias
        self._log = log or EntryLog(store=store, prefix=check_key(f"models/{alias}/log"), kinds=MODEL_KINDS)
        self._head: ReadEntry | None = None
        self.state = RegistryState()

    def refresh(self) -> RegistryState:
        """Read the entries appended since and return the state after them."""
        for read in self._log.read_after(self._head):
            self._accept(read)
        return self.state

    def append(self, decide: Callable[[RegistryState], ModelDecision | None]) -> RegistryState:
        """Append what `decide` returns for the newest state, and call it again each time a race is lost."""
        while True:
            refuse_old_writer(self.refresh().closed_to_writers(), f"alias {self.alias}")
            body = decide(self.state)
            if body is None:
                return self.state
            read = self._log.append(body, after=self._head, writer=this_writer())
            if read is not None:
                self._accept(read)
                return self.state

    def _accept(self, read: ReadEntry) -> None:
        self._head = read
        self.state = _apply(self.state, read.entry)


def list_aliases(store: ObjectStore) -> list[str]:
    """Return the store's aliases, sorted."""
    return [key.split("/")[1] for key in store.folders("models")]


def _apply(state: RegistryState, entry: Entry) -> RegistryState:
    at, body = entry.at, entry.body
    if not isinstance(body, Promoted | Refused | RolledBack):
        return state if state.newer else replace(state, newer=newer_entry(entry))
    champions, decided = state.champions, state.decided_pins
    if isinstance(body, Promoted):
        champions = (*champions, (at, body))
    if isinstance(body, RolledBack):  # the promotions between the newest and the named one cannot be read any more
        champions = champions[:-1]
        while champions and champions[-1][1].manifest_sha256 != body.manifest_sha256:
            champions = champions[:-1]
    elif body.hold_id:
        decided |= {body.hold_id}
    return replace(state, champions=champions, history=(*state.history, (at, body)), decided_pins=decided)
