"""Judges logs by docs/reference/log.md alone: its rules and tables, plain JSON and hashlib, nothing of the product."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "log.md"
LAST, RESUMABLE, VERSION = 9_999_999_999, 8, 1
_OWN_LINE = b' "checksum": '
_FOLDERS, _BEFORE_OPENED = ("runs", "models"), ("run-opened", "fork-abandoned")
_AFTER = {
    "checkpoint-quarantined": (("committed",), "quarantined"),
    "checkpoint-restored": (("quarantined",), "committed"),
    "checkpoint-superseded": (("committed", "quarantined"), "superseded"),
    "checkpoint-deleted": (("superseded",), "deleted"),
}
"""The states that a checkpoint may have before an entry of this kind, and the one that it has afterwards."""
_FITS: dict[str, Callable[[Any], bool]] = {
    "any value": lambda value: True,
    "text": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "time": lambda value: isinstance(value, str) and datetime.fromisoformat(value).utcoffset() is not None,
}


class Violation(AssertionError):
    """An invariant does not hold; the first word names it."""


def require(holds: bool, invariant: str, detail: object = "") -> None:
    """Raise `Violation` naming the invariant unless it holds."""
    if not holds:
        raise Violation(f"{invariant}: {detail}")


@cache
def _page() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the record of each kind, and the type of each field of each record."""
    head, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    rows = {section.split("\n")[0]: re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M) for section in sections}
    kinds = dict(re.findall(r"^\| `([\w -]+)` \| \[(\w+)\]", head, re.M))
    return kinds, {record: dict(fields) for record, fields in rows.items() if fields}


def _check(value: Any, words: str, where: str) -> None:
    """Require a value to be of a type in the page's words."""
    if words.startswith("("):
        _check(value, words[1:-1], where)
    elif words.endswith(" or null"):
        if value is not None:
            _check(value, words.removesuffix(" or null"), where)
    elif named := re.match(r"\[(\w+)\]", words):
        _check_record(value, named[1], where)
    elif words.startswith("list of "):
        require(isinstance(value, list), "documented types", f"{where}: {value!r} is no {words}")
        for item in value:
            _check(item, words.removeprefix("list of "), where)
    elif words.startswith("object of "):
        require(isinstance(value, dict), "documented types", f"{where}: {value!r} is no {words}")
        for name, item in value.items():
            _check(item, words.removeprefix("object of "), f"{where} {name}")
    else:
        require(_FITS[words](value), "documented types", f"{where}: {value!r} is no {words}")


def _check_record(value: Any, record: str, where: str) -> None:
    fields = _page()[1][record]
    require(isinstance(value, dict), "documented types", f"{where}: {value!r} is no {record}")
    require(
        value.keys() <= fields.keys(), "documented fields", f"{where}: {record} has no {value.keys() - fields.keys()}"
    )
    for name, item in value.items():
        _check(item, fields[name], f"{where} {record}.{name}")


@lru_cache(maxsize=10_000)
def parse_entry(data: bytes) -> tuple[dict[str, Any], str]:
    """Return an entry and its SHA-256; raises `Violation` where fields, types or checksum are not as documented."""
    entry: dict[str, Any] = json.loads(data)
    if entry.get("checksum") is not None:
        lines = data.split(b"\n")
        (own,) = (line for line in lines if line.startswith(_OWN_LINE))
        lines.remove(own)
        found = hashlib.sha256(b"\n".join(lines)).hexdigest()
        require(entry["checksum"] == found, "checksum", f"seq {entry['seq']}: {found} is not {entry['checksum']}")
    kinds, _ = _page()
    if entry["version"] <= VERSION and entry["kind"] in kinds:
        _check_record(entry, kinds["every entry"], f"seq {entry['seq']}")
        _check_record(entry["body"], kinds[entry["kind"]], f"seq {entry['seq']}")
    return entry, hashlib.sha256(data).hexdigest()


def read_log(objects: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return the entries of a log by its objects' names, oldest first; raises `Violation` for holes, broken chains."""
    names = sorted(objects, reverse=True)
    require(names == [f"{LAST - seq:010d}.json" for seq in range(len(names))], "log contiguous", names)
    parsed = [parse_entry(objects[name]) for name in names]
    entries, digests = [entry for entry, _ in parsed], [digest for _, digest in parsed]
    require(
        [entry["seq"] for entry in entries] == list(range(len(entries))), "log contiguous", "a seq is not its name's"
    )
    require([entry["prev"] for entry in entries] == [None, *digests[:-1]][: len(entries)], "prev chain", names[-1:])
    require(
        len({entry["write_id"] for entry in entries}) == len(entries), "no entry twice", "one write_id, two numbers"
    )
    return entries


class _Run:
    """A run after its entries so far, as far as the page's rules need it."""

    def __init__(self) -> None:
        self.claims, self.owner, self.is_opened, self.is_deleted = 0, None, False, False
        self.commits, self.status = dict[str, dict[str, Any]](), dict[str, str]()

    def take(self, entry: dict[str, Any]) -> None:
        kind, body, where = entry["kind"], entry["body"], f"seq {entry['seq']}: {entry['kind']}"
        require((kind in _BEFORE_OPENED) is not self.is_opened, "opened once, first", where)
        self.is_opened |= kind == "run-opened"
        named = entry["writer"]["attempt"]
        require(named in (None, self.owner), "fencing", f"{where} of attempt {named}, open is {self.owner}")
        if kind == "attempt-started":
            require(body["attempt"] == self.claims + 1 and self.owner is None and not self.is_deleted, "claims", where)
            self.claims = self.owner = body["attempt"]
        elif kind == "attempt-ended":
            require(body["attempt"] == self.owner, "one end", where)
            self.owner = None
        elif kind == "checkpoint-committed":
            require(
                body["attempt"] == named and body["prefix"] not in self.status, "committed once, by its owner", where
            )
            self.commits[body["prefix"]], self.status[body["prefix"]] = body, "committed"
        elif kind in _AFTER:
            self._move(body, *_AFTER[kind], where)
        elif kind == "run-deleted":
            require(self.owner is None and not self.is_deleted, "deleted once, unowned", where)
            kept = [prefix for prefix, state in self.status.items() if state in ("committed", "quarantined")]
            self.status, self.is_deleted = {**self.status, **dict.fromkeys(kept, "superseded")}, True
        require(entry["resume"] == self._resumable(), "resume points", f"{where}: {entry['resume']}")

    def _move(self, body: dict[str, Any], before: tuple[str, ...], after: str, where: str) -> None:
        prefix = body["prefix"]
        require(self.status.get(prefix) in before, "states follow in order", f"{where}: {self.status.get(prefix)}")
        require(self.commits[prefix]["manifest_sha256"] == body["manifest_sha256"], "states follow in order", where)
        self.status[prefix] = after

    def _resumable(self) -> list[dict[str, Any]]:
        newest = [body for prefix, body in reversed(self.commits.items()) if self.status[prefix] == "committed"]
        return [{name: body[name] for name in _page()[1]["CheckpointReference"]} for body in newest[:RESUMABLE]]


def judge_log(objects: Mapping[str, bytes], folder: str) -> int:
    """Return the number of entries of a log below `runs` or `models`; raises `Violation` where a rule is broken."""
    entries, run = read_log(objects), _Run()
    for entry in entries:
        if entry["version"] > VERSION or entry["kind"] not in _page()[0]:
            break  # nothing is known of what follows
        if folder == "runs":
            run.take(entry)
        else:
            require(entry["resume"] == [], "resume points", f"seq {entry['seq']} of an alias")
    return len(entries)


def judge_store(store: Any) -> int:
    """Judge every log of a store by its `folders`, `keys` and `read`; returns the number of entries."""
    logs = [f"{folder}/log" for kind in _FOLDERS for folder in store.folders(kind)]
    return sum(_judge(log, {key.rpartition("/")[2]: store.read(key) for key in store.keys(log)}) for log in logs)


def judge_files(root: Path) -> int:
    """Judge every log of every store of files below a folder; returns the number of entries."""
    judged = 0
    for folder, _, names in os.walk(root):
        if folder.endswith("/log") and folder.split("/")[-3] in _FOLDERS:
            objects = {name: Path(folder, name).read_bytes() for name in names if not name.startswith(".")}
            judged += _judge(folder, objects)
    return judged


def _judge(log: str, objects: Mapping[str, bytes]) -> int:
    try:
        return judge_log(objects, log.split("/")[-3])
    except Violation as violation:
        raise Violation(f"{violation} [{log}]") from violation
