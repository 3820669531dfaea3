"""What a run's raw entries say, told by other code than the product's: the judge may not be the accused.

Owns the rules of ARCHITECTURE section 2 as plain statements about JSON. Every entry of a log must be legal where it
stands: a writer that follows the protocol never appends one that readers would refuse.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from cairn.storage.errors import StorageError
from cairn.storage.logs.log_entry import entry_name
from cairn.storage.stores.object_store import ObjectStore
from tests import log_judge
from tests.log_judge import Violation as Violation
from tests.log_judge import require as require
from tests.memory_store import MemoryStore

READABLE, BROKEN, GIVEN_UP, GONE = "committed", "quarantined", "superseded", "deleted"
RESUME_POINTS = 8
VERSION = 1
_NO_LOGS = frozenset({"heartbeats"})


@dataclass
class RawRun:
    """One run after its raw entries so far."""

    claims: int = 0
    owner: int | None = None
    resumed: str | None = None
    opened: bool = False
    finished: bool = False
    deleted: bool = False
    beginning: str | None = None
    keeps: int = 1
    grown: bool = False
    abandoned: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    commits: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: dict[str, str] = field(default_factory=dict)
    pins: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    condemned: set[str] = field(default_factory=set)
    unreadable: set[str] = field(default_factory=set)
    closed: bool = False
    resume: list[dict[str, Any]] = field(default_factory=list)

    @property
    def readable(self) -> list[str]:
        """Prefixes of committed checkpoints, newest commit first."""
        return [prefix for prefix in reversed(self.order) if self.status[prefix] == READABLE]

    def take(self, raw: dict[str, Any]) -> None:
        """Add one entry; raises `Violation` where it may not stand here."""
        kind, body, attempt = raw["kind"], raw["body"], raw["writer"]["attempt"]
        require(not self.closed, "an old writer stops", f"seq {raw['seq']} behind an entry of a newer version")
        if raw["version"] > VERSION:
            self.closed = True
            return
        if attempt is not None:
            require(attempt == self.owner, "fencing", f"seq {raw['seq']} by attempt {attempt}, owner is {self.owner}")
        take = getattr(self, f"_{kind.replace('-', '_')}", None)
        if take is not None:  # a kind that moves no checkpoint and no owner needs no rule of its own
            take(body, raw)
        must = self.resume
        require(raw["resume"] == must, "resume points", f"seq {raw['seq']} says {raw['resume']}, must say {must}")

    def _run_opened(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        first = not self.opened and raw["seq"] == len(self.abandoned)
        require(first, "no entry twice", "a run is opened once, first")
        self.opened = True
        if origin := body["forked_from"]:
            self.beginning, self.keeps = origin["checkpoint"]["prefix"], origin["config"]["checkpoint"]["keep_last"]

    def _fork_abandoned(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        may = not self.opened and body["pin_id"] not in self.abandoned
        require(may, "no entry twice", f"pin {body['pin_id']} is given up in a run that is open, or again")
        self.abandoned.add(body["pin_id"])

    def _attempt_started(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        require(not self.deleted, "a deleted run is over", f"attempt {body['attempt']} of a deleted run")
        require(body["attempt"] == self.claims + 1, "attempts +1", f"{body['attempt']} after {self.claims}")
        require(self.owner is None, "one owner", f"attempt {body['attempt']} while {self.owner} is open")
        self.claims = self.owner = body["attempt"]
        self.resumed = body["resumed_from"]["prefix"] if body["resumed_from"] else None
        newest = next(iter(self.readable), self.beginning)
        if self.beginning is not None:
            self.keeps = body["config"]["checkpoint"]["keep_last"]
            self.grown = self.grown and self.resumed != self.beginning
        require(self.resumed == newest, "resumes from the newest", f"{self.resumed}, newest is {newest}")
        self.pins = {name: pin for name, pin in self.pins.items() if pin["during_attempt"] is None}

    def _attempt_ended(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        require(body["attempt"] == self.owner, "one end", f"attempt {body['attempt']} ends while {self.owner} is open")
        self.ended.add(body["attempt"])
        self.owner = self.resumed = None

    def _checkpoint_committed(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        require(body["attempt"] == self.owner == raw["writer"]["attempt"], "fencing", f"commit by {body['attempt']}")
        require(body["prefix"] not in self.status, "no entry twice", f"{body['prefix']} is committed twice")
        self.order.append(body["prefix"])
        self.commits[body["prefix"]] = body
        self._set(body["prefix"], READABLE)

    def _checkpoint_quarantined(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        self._move(body, (READABLE,), BROKEN)
        self.condemned.add(body["prefix"])
        found = [item["found"] for item in body["evidence"]]
        if found and all(said.startswith("cannot be read") for said in found):
            self.unreadable.add(body["prefix"])

    def _checkpoint_restored(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        self._move(body, (BROKEN,), READABLE)
        self.condemned.discard(body["prefix"])

    def _checkpoint_superseded(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        prefix, step = body["prefix"], body["step"]
        require(not self.pins_of(prefix), "nothing needed is superseded", f"{prefix} is pinned")
        require(self.resumed != prefix, "nothing needed is superseded", f"{prefix} is resumed from")
        newer = any(self.commits[other]["step"] > step for other in self.readable)
        require(newer, "nothing needed is superseded", f"{prefix} is the newest readable one")
        self._move(body, (READABLE, BROKEN), GIVEN_UP)

    def _checkpoint_deleted(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        self._move(body, (GIVEN_UP,), GONE)

    def _checkpoint_pinned(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        require(self.status.get(body["prefix"]) == READABLE, "only what is committed is pinned", body["prefix"])
        require(body["during_attempt"] in (None, self.claims), "fencing", "a pin by an attempt that is not the latest")
        self.pins[body["pin_id"]] = body

    def _checkpoint_unpinned(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        require(body["pin_id"] in self.pins, "no entry twice", f"pin {body['pin_id']} is unpinned again")
        del self.pins[body["pin_id"]]

    def _evaluation_recorded(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        self.pins.pop(body["pin_id"], None)  # its own: somebody else may still read the same bytes

    _evaluation_failed = _evaluation_recorded

    def _run_finished(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        require(not self.finished, "no entry twice", "a run is finished once")
        self.finished = True

    def _run_deleted(self, body: dict[str, Any], raw: dict[str, Any]) -> None:
        require(self.opened and not self.deleted, "no entry twice", "a run is deleted once")
        require(self.owner is None, "nothing needed is superseded", f"attempt {self.owner} is open")
        needing = [pin for pin in self.pins.values() if pin["alias"] or pin["fork"]]
        require(not needing, "nothing needed is superseded", needing)
        self.deleted, self.pins = True, {}
        self.condemned.clear()  # a person decides, whatever state they are in
        for prefix, status in self.status.items():
            if status in (READABLE, BROKEN):
                self._set(prefix, GIVEN_UP)

    @property
    def needed_beginning(self) -> str | None:
        """The checkpoint of another run that this fork cannot do without."""
        return None if self.grown or self.finished or self.deleted else self.beginning

    def pins_of(self, prefix: str) -> list[str]:
        """Return the ids of the pins in force on a checkpoint."""
        return [name for name, pin in self.pins.items() if pin["prefix"] == prefix]

    def _move(self, body: dict[str, Any], before: tuple[str, ...], after: str) -> None:
        prefix = body["prefix"]
        legal = self.status.get(prefix) in before and self.commits[prefix]["manifest_sha256"] == body["manifest_sha256"]
        require(legal, "states follow in order", f"{prefix}: {self.status.get(prefix)} → {after}")
        self._set(prefix, after)

    def _set(self, prefix: str, status: str) -> None:
        self.status[prefix] = status
        self.resume = [
            {name: self.commits[prefix][name] for name in ("step", "attempt", "prefix", "manifest_sha256")}
            for prefix in self.readable[:RESUME_POINTS]
        ]
        self.grown = self.grown or len(self.readable) >= self.keeps


def mirrored(
    store: ObjectStore, *, without: frozenset[str] = frozenset(), known: dict[str, bytes] | None = None
) -> ObjectStore:
    """Return the store itself or, for one of files, its content read past the product and in memory.

    What is in `known` is not read again: for log entries, which nobody overwrites, between two deletions.
    """
    place = store.local_path("runs")
    if place is None:
        return store
    root, mirror = str(place.parent), MemoryStore("mirror")
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without]
        for name in names:
            if not name.startswith("."):
                path = f"{folder}/{name}"
                data = known.get(path) if known is not None else None
                if data is None:
                    data = Path(path).read_bytes()
                mirror.write(path[len(root) + 1 :], data)
                if known is not None and folder.endswith("/log"):
                    known[path] = data
    return mirror


def read_raw(store: ObjectStore, log: str) -> list[dict[str, Any]]:
    """Return a log's entries as JSON, oldest first; raises `Violation` on holes, broken chains and entries twice."""
    objects = {key.rpartition("/")[2]: store.read(key) for key in store.keys(log)}
    found = log_judge.read_log(objects)
    _require_nothing_twice([(raw, _words(objects[entry_name(raw["seq"])])) for raw in found])
    return found


@lru_cache(maxsize=10_000)
def _words(data: bytes) -> str:
    """Return what an entry says in words that equal entries share."""
    raw = json.loads(data)
    return json.dumps([raw["kind"], raw["writer"], raw["body"]], sort_keys=True)


def _require_nothing_twice(parsed: list[tuple[dict[str, Any], str]]) -> None:
    said: set[str] = set()
    before = ""
    for raw, words in parsed:
        again = words == before if raw["kind"] == "rolled-back" else words in said
        require(not again, "no entry twice", f"seq {raw['seq']} repeats a {raw['kind']}")
        said.add(words)
        before = words


def tell_run(store: ObjectStore, run: str) -> RawRun:
    """Return what the raw entries of a run say."""
    told = RawRun()
    for raw in read_raw(store, f"{run}/log"):
        told.take(raw)
    return told


def tell_others(store: ObjectStore, prefix: str) -> Iterator[tuple[str, RawRun]]:
    """Yield the runs beside that of a checkpoint's folder, with what their raw entries say."""
    own = "/".join(prefix.split("/")[:2])
    yield from ((run, tell_run(store, run)) for run in store.folders("runs") if run != own)


def find_damage(store: ObjectStore, body: dict[str, Any]) -> str | None:
    """Hash a committed checkpoint with nothing of the product's; returns what is wrong with it, or None."""
    prefix = body["prefix"]
    try:
        data = store.read(f"{prefix}/manifest.json")
        if hashlib.sha256(data).hexdigest() != body["manifest_sha256"]:
            return f"{prefix}: manifest"
        manifest = json.loads(data)
        for item in (manifest["trainer"], *manifest["shards"]):
            data = store.read(f"{prefix}/{item['name']}")
            hashed = data if item is manifest["trainer"] else _header_and_digests(data)
            if hashlib.sha256(hashed).hexdigest() != item["sha256"]:
                return f"{prefix}/{item['name']}"
    except StorageError as error:
        return str(error)
    return None


def _header_and_digests(shard: bytes) -> bytes:
    begin = 8 + int.from_bytes(shard[:8], "little")
    try:
        header = json.loads(shard[8:begin])
    except ValueError:
        return b""
    del header["__metadata__"]
    places = sorted(tensor["data_offsets"] for tensor in header.values())
    return shard[:begin] + b"".join(hashlib.sha256(shard[begin + a : begin + b]).digest() for a, b in places)


def tell_aliases(store: ObjectStore) -> dict[str, list[dict[str, Any]]]:
    """Return what each alias points at and could be rolled back to, newest last."""
    stacks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for folder in store.folders("models"):
        for raw in read_raw(store, f"{folder}/log"):
            if raw["kind"] == "promoted":
                stacks[folder].append(raw["body"])
            elif raw["kind"] == "rolled-back":
                stack, target = stacks[folder][:-1], raw["body"]["manifest_sha256"]
                while stack and stack[-1]["manifest_sha256"] != target:  # what cannot be read any more is passed by
                    stack.pop()
                require(bool(stack), "rollback", raw)
                stacks[folder] = stack
            elif raw["kind"] == "withdrawn":
                *older, newest = stacks[folder]
                require(newest["run_id"] != raw["body"]["run_id"], "nothing needed is superseded", raw)
                stacks[folder] = [*(item for item in older if item["run_id"] != raw["body"]["run_id"]), newest]
    return stacks


def reached(store: ObjectStore) -> Iterator[dict[str, Any]]:
    """Yield every promotion that an alias points at or could be rolled back to."""
    for stack in tell_aliases(store).values():
        yield from stack


def prove_deletable(store: ObjectStore, key: str, known: dict[str, bytes] | None = None) -> None:
    """Raise `Violation` unless the logs say, at this very moment, that nobody needs the object."""
    rule, parts = "nothing referenced deleted", key.split("/")
    require(parts[0] == "runs" and len(parts) > 2, rule, f"{key}: not an object of a run")
    if parts[2:] == ["fold.json"]:
        return
    store = mirrored(store, without=_NO_LOGS, known=known)
    told = tell_run(store, "/".join(parts[:2]))
    if parts[2] == "heartbeats":
        require(int(parts[3].removesuffix(".json").rsplit("-", 1)[1]) in told.ended, rule, f"{key}: not ended")
        return
    if parts[2] == "window-losses":
        require(told.deleted, rule, f"{key}: its run is not deleted")
        return
    require(parts[2] == "checkpoints" and len(parts) == 5, rule, f"{key}: may never be deleted")
    _prove_checkpoint_deletable(store, told, "/".join(parts[:4]), rule)


def _prove_checkpoint_deletable(store: ObjectStore, told: RawRun, prefix: str, rule: str) -> None:
    status = told.status.get(prefix)
    if status is None:
        require(int(prefix.rsplit("-", 1)[1]) in told.ended, rule, f"{prefix}: its attempt has not ended")
        return
    require(status in (GIVEN_UP, GONE), rule, f"{prefix}: is {status}")
    sound = prefix in told.condemned and find_damage(store, told.commits[prefix]) is None
    require(not sound, "no quarantine on one read", f"{prefix}: was quarantined, verifies, and is deleted")
    require(not told.pins_of(prefix), rule, f"{prefix}: is pinned")
    require(told.resumed != prefix, rule, f"{prefix}: an attempt resumes from it")
    require(all(body["prefix"] != prefix for body in reached(store)), rule, f"{prefix}: an alias reaches it")
    needing = [run for run, other in tell_others(store, prefix) if other.needed_beginning == prefix]
    require(not needing, "a fork keeps its beginning", f"{prefix}: {needing} begins with it")
