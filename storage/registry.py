"""The model registry: aliases such as `champion`, each a log of decisions.

Owns the fold from registry entries to the present alias and the append that decides again when somebody was faster.
Refuses to know the gates: the caller's `decide` is given the present champion and returns the body to append.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from storage.entry_log import EntryLog, ReadEntry, this_writer
from storage.object_store import ObjectStore, checked_key
from storage.registry_entries import MODEL_KINDS, Promoted, Refused, RolledBack


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryState:
    """What an alias points at now, and everything it pointed at before, oldest first."""

    champions: tuple[tuple[datetime, Promoted], ...] = ()
    refusals: tuple[tuple[datetime, Refused], ...] = ()
    decided_holds: frozenset[str] = frozenset()

    @property
    def champion(self) -> Promoted | None:
        """The promotion in force, or None."""
        return self.champions[-1][1] if self.champions else None

    def reaches(self, manifest_sha256: str) -> bool:
        """Whether the alias points at these weights, or a rollback could take it there."""
        return any(promoted.manifest_sha256 == manifest_sha256 for _, promoted in self.champions)


class Registry:
    """The log of one alias with its folded state."""

    def __init__(self, store: ObjectStore, alias: str, *, log: EntryLog | None = None) -> None:
        """Open the alias; nothing is read yet."""
        self.alias = alias
        self._log = log or EntryLog(store=store, prefix=checked_key(f"models/{alias}/log"), kinds=MODEL_KINDS)
        self._head: ReadEntry | None = None
        self.state = RegistryState()

    def refresh(self) -> RegistryState:
        """Read what was appended since and return the state after it."""
        for read in self._log.read_after(self._head):
            self._accept(read)
        return self.state

    def append(self, decide: Callable[[RegistryState], Promoted | Refused | RolledBack | None]) -> RegistryState:
        """Append what `decide` returns for the newest state, deciding again whenever somebody was faster."""
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
        self.state = _after(self.state, read.entry.at, read.entry.body)


def list_aliases(store: ObjectStore) -> list[str]:
    """Return the aliases of the store, sorted."""
    return [key.split("/")[1] for key in store.folders("models")]


def _after(state: RegistryState, at: datetime, body: object) -> RegistryState:
    match body:
        case Promoted():
            champions = (*state.champions, (at, body))
            return replace(state, champions=champions, decided_holds=_decided(state, body))
        case Refused():
            refusals = (*state.refusals, (at, body))
            return replace(state, refusals=refusals, decided_holds=_decided(state, body))
        case RolledBack():
            return replace(state, champions=state.champions[:-1])
        case _:
            return state


def _decided(state: RegistryState, body: Promoted | Refused) -> frozenset[str]:
    return state.decided_holds | {body.hold_id} if body.hold_id else state.decided_holds
