"""A store somebody else wrote to: a run and an alias whose entries can be changed and are chained anew."""

import contextlib
import copy
import hashlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cairn.cli.command import run_command
from cairn.storage.logs.log_entry import entry_name
from cairn.storage.stores.local_store import LocalStore
from tests.entries import noted
from tests.fabricated_run import HUMAN, FabricatedRun, fabricate, promote

VERBS = [
    "runs", "status bard", "attempts bard", "checkpoints bard", "evaluations bard", "explain bard",
    "explain bard --attempt 1", "report bard", "log bard", "models", "models --history", "diagnose bard",
    "verify bard", "sweep bard --dry-run", "note bard",
]  # fmt: skip
AS_JSON = ["status bard --json", "log bard --json", "explain bard --json", "report bard --json", "models --json"]
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b2J\x00\x08\u202eevil\u2066\x7f\r"
FEW_VALUES: list[Any] = [
    None, True, -1, 2**64, 10**400, 1e308, "x", ESCAPES, "\x00", [], {}, {"a": {"b": []}}, "9999-12-31T23:59:59-14:00",
]  # fmt: skip
MORE_VALUES: list[Any] = [
    0, 2**31, 2**63, 0.5, "", "<script>alert(1)</script>", "../../etc/passwd", "/etc/passwd", "x" * 5000, [1],
    "0001-01-01T00:00:00+14:00", "f" * 64, "'; drop table runs; --",
]  # fmt: skip


class HostileStore:
    """A run and an alias whose entries can be changed and are chained anew."""

    def __init__(self, root: Path, *, is_finished: bool = True) -> None:
        self.root = root
        store = LocalStore(root)
        run = fabricate(store, "bard")
        fill(run)
        promote(store, "bard", run.commit(30), loss=2.0, alias="champion")
        if is_finished:
            run.end("completed", action="finish")
        else:
            run.end("lost", action="resume", charged="lost")
        self.logs = {name: root / name / "log" for name in ("runs/bard", "models/champion")}
        self.originals = {name: self._entries(folder) for name, folder in self.logs.items()}

    def write(self, name: str, entries: list[Any]) -> None:
        """Write these entries over the log, each with the hash of the one before."""
        previous = None
        for seq, entry in enumerate(entries):
            data = json.dumps({**entry, "prev": previous} if isinstance(entry, dict) else entry).encode()
            previous = hashlib.sha256(data).hexdigest()
            (self.logs[name] / entry_name(seq)).write_bytes(data)

    def change_all_words(self, words: str) -> None:
        """Put these words behind every word of every entry that is free to be any word."""
        for name, entries in self.originals.items():
            self.write(name, [{**entry, "body": with_words(entry["body"], words)} for entry in entries])

    def entries_of(self, name: str = "runs/bard") -> list[Any]:
        """Return a copy of the entries of a log, to be changed."""
        return copy.deepcopy(self.originals[name])

    def restore(self) -> None:
        for name, entries in self.originals.items():
            self.write(name, entries)

    @contextlib.contextmanager
    def written(self, entries: list[Any], name: str = "runs/bard") -> Iterator[None]:
        """Write these entries over the log while the block runs."""
        self.write(name, entries)
        try:
            yield
        finally:
            self.restore()

    def say(self, line: str) -> tuple[int, str, str]:
        """Run a verb in this process; returns exit code, stdout, stderr."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_command([*line.split(), "--store", str(self.root)])
        return code, out.getvalue(), err.getvalue()

    @staticmethod
    def _entries(folder: Path) -> list[Any]:
        entries = (json.loads(path.read_text()) for path in sorted(folder.iterdir(), reverse=True))
        return [{name: value for name, value in entry.items() if name != "checksum"} for entry in entries]


def fill(run: FabricatedRun) -> None:
    run.start()
    run.evaluate(run.commit(10), loss=3.0)
    run.evaluate(run.commit(20), loss=None)
    run.end("preempted", action="resume", charged="preempted")
    run.start()
    run.evaluate(run.log.state.checkpoints[-1].committed.reference, loss=2.0)
    run.log.append(lambda state: noted(untagged=()), writer=HUMAN)


KEPT = {"config", "left", "manifest_sha256", "prefix", "tags", "attempt", "action", "reason", "charged", "started_at"}
KEPT |= {"run_id"}


def with_words(value: Any, words: str) -> Any:
    match value:
        case dict():
            kept = KEPT - {"reason"}
            return {key: item if key in kept else with_words(item, words) for key, item in value.items()}
        case list():
            return [with_words(item, words) for item in value]
        case str() if not re.match(r"\d{4}-\d\d-\d\dT", value):
            return value + words
        case _:
            return value


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    return [place for key, value in inner for place in [(*path, key), *places(value, (*path, key))]]


def change(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    if value is ...:
        del document[path[-1]]
    else:
        document[path[-1]] = value
