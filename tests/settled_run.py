"""Runs that `cairn train` answers without a flow: one that is finished in every respect, and one with a live owner."""

from datetime import UTC, datetime

from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.step_log import Heartbeat, write_heartbeat
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.evaluator.evaluation_run import suite_of
from cairn.tasks.machine.placement import this_placement
from tests.fabricated_run import FabricatedRun, configuration, fabricate, promote

SUITE = suite_of(configuration().evaluation).sha256


def finish(store: ObjectStore) -> tuple[FabricatedRun, CheckpointReference]:
    """Store the run `done`, trained to its end: no evaluation and no decision is on record."""
    run = fabricate(store, "done")
    run.start()
    return run, run.complete()


def store_done(store: ObjectStore) -> FabricatedRun:
    """Store the run `done`, of which nothing is left to do: its last checkpoint is champion."""
    run, last = finish(store)
    run.evaluate(last, loss=2.5, suite_sha256=SUITE)
    promote(store, "done", last, loss=2.5, alias="champion")
    return run


def hold(run: FabricatedRun, *, beat_at: datetime | None = None) -> None:
    """Have this very process own the run; its heartbeat is of `beat_at`, or of now."""
    run.start(placement=this_placement(device="cpu", threads=1))
    at = beat_at or datetime.now(UTC)
    beat = Heartbeat(attempt=1, beat=1, step=1, train_loss=1.0, tokens=1, gpu_seconds=1.0, at=at)
    write_heartbeat(run.log.store, run.log.prefix, beat)
