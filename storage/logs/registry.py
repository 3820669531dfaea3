"""The model registry: each alias, such as `champion`, is a log of decisions with its own fold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from storage.logs.entry_log import EntryLog, ReadEntry, this_writer
from storage.logs.registry_entries import MODEL_KINDS, Promoted, Refused, RolledBack
from storage.stores.object_store import ObjectStore, check_key

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

    @property
    def champion(self) -> Promoted | None:
        """The current promotion, or None."""
        return self.champions[-1][1] if self.champions else None

    @property
    def refusals(self) -> tuple[tuple[datetime, Refused], ...]:
        """Every refusal, oldest first."""
        return tuple((at, body) for at, body in self.history if isinstance(body, Refused))

    def reaches(self, manifest_sha256: str) -> bool:
        """Whether the alias points at these weights or a rollback could go back to them."""
        return any(promoted.manifest_sha256 == manifest_sha256 for _, promoted in self.champions)


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
            body = decide(self.refresh())
            if body is None:
                return self.state
            read = self._log.append(body, after=self._head, writer=this_writer())
            if read is not None:
                self._accept(read)
                return self.state

    def _accept(self, read: ReadEntry) -> None:
        self._head = read
        self.state = _apply(self.state, read.entry.at, read.entry.body)


def list_aliases(store: ObjectStore) -> list[str]:
    """Return the store's aliases, sorted."""
    return [key.split("/")[1] for key in store.folders("models")]


def _apply(state: RegistryState, at: datetime, body: object) -> RegistryState:
    match body:
        case Promoted():
            champions, decided = (*state.champions, (at, body)), _with_pin(state, body)
        case Refused():
            champions, decided = state.champions, _with_pin(state, body)
        case RolledBack():
            champions, decided = _go_back(state.champions, body.manifest_sha256), state.decided_pins
        case _:
            return state
    return replace(state, champions=champions, history=(*state.history, (at, body)), decided_pins=decided)


def _go_back(
    champions: tuple[tuple[datetime, Promoted], ...], manifest_sha256: str | None
) -> tuple[tuple[datetime, Promoted], ...]:
    """Drop the newest promotion, and those before it down to the named one: their weights can no longer be read."""
    before = champions[:-1]
    while before and before[-1][1].manifest_sha256 != manifest_sha256:
        before = before[:-1]
    return before


def _with_pin(state: RegistryState, body: Promoted | Refused) -> frozenset[str]:
    return state.decided_pins | {body.hold_id} if body.hold_id else state.decided_pins
