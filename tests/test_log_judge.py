"""The judge of logs knows the page alone, takes what the product writes, and finds each kind of fault in it."""

import ast
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import log_judge
from tests.fabricated_run import store_bard
from tests.log_judge import Violation, judge_files, judge_log, judge_store
from tests.memory_store import MemoryStore

Entries = list[dict[str, Any]]
LOG = "runs/bard/log"


@pytest.fixture(scope="module")
def written() -> Entries:
    """The entries of a run of two attempts, as their JSON."""
    store = MemoryStore("bard")
    store_bard(store)
    assert judge_store(store) == len(store.keys(LOG)) + 2
    return [json.loads(store.read(key)) for key in reversed(store.keys(LOG))]


def objects_of(entries: Entries) -> dict[str, bytes]:
    """Return the objects of a log, with the right `prev` and checksum whatever they say."""
    objects, previous = dict[str, bytes](), None
    for seq, entry in enumerate(entries):
        rest = {**entry, "seq": seq, "prev": previous}
        rest.pop("checksum", None)
        lines = json.dumps(rest, indent=1, sort_keys=True).encode().split(b"\n")
        place = next(number for number, line in enumerate(lines) if line.startswith(b' "kind"'))
        own = hashlib.sha256(b"\n".join(lines)).hexdigest()
        data = b"\n".join([*lines[:place], f' "checksum": "{own}",'.encode(), *lines[place:]])
        objects[f"{9_999_999_999 - seq:010d}.json"], previous = data, hashlib.sha256(data).hexdigest()
    return objects


def test_the_judge_imports_nothing_but_the_standard_library() -> None:
    nodes = ast.walk(ast.parse(Path(log_judge.__file__).read_text(encoding="utf-8")))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    nodes = ast.walk(ast.parse(Path(log_judge.__file__).read_text(encoding="utf-8")))
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_sound_log_is_taken(written: Entries) -> None:
    assert judge_log(objects_of(written), "runs") == len(written)


def find(entries: Entries, kind: str, place: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = [entry for entry in entries if entry["kind"] == kind][place]
    return found


def drop(kind: str) -> Callable[[Entries], None]:
    return lambda entries: entries.remove(find(entries, kind))


def put(kind: str, **changed: object) -> Callable[[Entries], None]:
    return lambda entries: find(entries, kind)["body"].update(changed)


def repeat(kind: str, **changed: object) -> Callable[[Entries], None]:
    def change(entries: Entries) -> None:
        entries.append({**find(entries, kind), "resume": entries[-1]["resume"], "write_id": "again", **changed})

    return change


def overfull(entries: Entries) -> None:
    entries[-1]["resume"] = [*entries[-1]["resume"], *entries[-1]["resume"]]


FAULTS: dict[str, tuple[str, Callable[[Entries], None]]] = {
    "a field that is on no page": ("documented fields", put("checkpoint-committed", colour="red")),
    "text for a number": ("documented types", put("checkpoint-committed", step="10")),
    "a truth value for a number": ("documented types", put("checkpoint-committed", bytes=True)),
    "a time without a zone": ("documented types", lambda entries: entries[0].update(at="2026-01-01T12:00:00")),
    "a wrong value deep inside": ("documented types", put("attempt-ended", decision={"left": {"oom": "many"}})),
    "one write_id twice": ("no entry twice", lambda entries: entries[1].update(write_id=entries[0]["write_id"])),
    "no opening": ("opened once, first", drop("run-opened")),
    "a second opening": ("opened once, first", repeat("run-opened")),
    "an attempt left out": ("fencing", drop("attempt-started")),
    "a second claim of an owned run": ("claims", repeat("attempt-started")),
    "a commit of another attempt": ("committed once, by its owner", put("checkpoint-committed", attempt=7)),
    "an end left out": ("claims", drop("attempt-ended")),
    "a commit twice": ("fencing", repeat("checkpoint-committed")),
    "a commit left out": ("resume points", drop("checkpoint-committed")),
    "a resume list that is too long": ("resume points", overfull),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_the_rule_that_forbids_it(written: Entries, name: str) -> None:
    invariant, change = FAULTS[name]
    entries = json.loads(json.dumps(written))
    change(entries)
    with pytest.raises(Violation, match=f"^{invariant}"):
        judge_log(objects_of(entries), "runs")


def test_a_hole_a_renamed_entry_and_a_foreign_name_are_found(written: Entries) -> None:
    for broken in (lambda objects: objects.pop("9999999997.json"), lambda objects: objects.update({"x.json": b"{}"})):
        objects = objects_of(written)
        broken(objects)
        with pytest.raises(Violation, match=r"^log contiguous"):
            judge_log(objects, "runs")


@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_flipped_bit_of_any_entry_is_found(written: Entries, place: int) -> None:
    objects = objects_of(written)
    name = sorted(objects, reverse=True)[place]
    objects[name] = objects[name].replace(b'"write_id": "', b'"write_id": "0')
    with pytest.raises(Violation, match=r"^checksum"):
        judge_log(objects, "runs")


def test_nothing_is_said_of_what_follows_an_entry_of_a_newer_program(written: Entries) -> None:
    entries = [
        *written,
        {**written[-1], "kind": "dream", "body": {"a": [1]}, "write_id": "w"},
        {**written[0], "write_id": "v"},
    ]
    assert judge_log(objects_of(entries), "runs") == len(entries)


@pytest.mark.unsound_log
def test_every_log_below_a_folder_is_judged(written: Entries, tmp_path: Path) -> None:
    log = tmp_path / "deep" / "store" / LOG
    log.mkdir(parents=True)
    for name, data in objects_of(written).items():
        (log / name).write_bytes(data)
    assert judge_files(tmp_path) == len(written)
    (log / "9999999999.json").unlink()
    with pytest.raises(Violation, match=LOG):
        judge_files(tmp_path)
