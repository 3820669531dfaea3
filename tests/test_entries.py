"""The fabricated entries tell their fields apart: no two of a record are equal, none is empty, zero or its default."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cairn.storage.logs.run_entries import EvaluationFailed, EvaluationRecorded
from cairn.storage.logs.step_log import read_heartbeat
from cairn.storage.stores.local_store import LocalStore
from tests import entries
from tests.fabricated_run import FabricatedRun, fabricate
from tests.storage.builders import committed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MEANT: Mapping[str, frozenset[str]] = {
    "RunOpened": frozenset(
        {"initial_weights_sha256", "initial_source_sha256", "smallest_writer_version", "forked_from"}
    ),
    "AttemptStarted": frozenset({"resumed_from", "activation_checkpointing", "faults", "claim_id"}),
    "Heartbeat": frozenset({"claim_id"}),
    "Decision": frozenset({"charged", "micro_batch", "activation_checkpointing"}),
    "EvaluationRecorded": frozenset({"pin_id", "verdict", "window_losses_sha256"}),
    "EvaluationFailed": frozenset({"pin_id"}),
}
"""Fields that change what follows in a run, so that only a test whose claim they are sets them."""
RECORDS = (
    entries.placement(),
    entries.opened("bard"),
    entries.started(1),
    entries.ended(1),
    entries.decided(),
    entries.evaluated(40, 2.5),
    entries.noted(),
    committed(20, 1),
)


@pytest.fixture
def run(tmp_path: Path) -> FabricatedRun:
    """A run of which every kind of entry was fabricated."""
    run = fabricate(LocalStore(tmp_path), "bard")
    run.start()
    reference = run.commit(20)
    run.evaluate(reference, loss=2.5)
    run.evaluate(reference, loss=None)
    run.beat(25)
    run.end("lost", action="resume", charged="lost")
    return run


def values(record: Any) -> dict[str, Any]:
    """Return the fields that a test does not have to set, as comparable text."""
    skipped = MEANT.get(type(record).__name__, frozenset())
    return {item.name: getattr(record, item.name) for item in fields(record) if item.name not in skipped}


def default_of(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def faults(record: "DataclassInstance") -> Iterator[str]:
    """Yield what keeps fields of this record from being told apart."""
    own, defaults = values(record), {item.name: default_of(item) for item in fields(record)}
    for name, value in own.items():
        if value is None or value in (0, "", (), {}) or value == defaults[name]:
            yield f"{name} = {value!r}"
        same = [other for other, found in own.items() if other > name and repr(found) == repr(value)]
        yield from (f"{name} = {other} = {value!r}" for other in same)
        if is_dataclass(value):
            yield from (f"{name}.{fault}" for fault in faults(value))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_no_two_fields_of_a_fabricated_entry_are_equal_and_none_is_a_default(record: "DataclassInstance") -> None:
    assert list(faults(record)) == []


def test_no_two_fields_of_a_fabricated_run_are_equal_and_none_is_a_default(run: FabricatedRun) -> None:
    found = {
        type(body).__name__: list(faults(body))
        for body in (entry.body for entry in run.log.read_entries())
        if not isinstance(body, EvaluationFailed | EvaluationRecorded) or body.started_at > entries.NOON
    }
    assert found == {name: [] for name in found} and len(found) == 6


def test_no_two_fields_of_a_fabricated_heartbeat_are_equal(run: FabricatedRun) -> None:
    heartbeat = read_heartbeat(run.log.store, run.log.prefix, 1)
    assert heartbeat is not None and list(faults(heartbeat)) == []


def test_the_entries_of_a_fabricated_run_have_times_of_their_own(run: FabricatedRun) -> None:
    times = [entry.at for entry in run.log.read_entries()]
    assert [later - sooner for sooner, later in pairwise(times)] == [timedelta(seconds=1)] * 5
