"""A heartbeat says "still here" and is never trusted with more."""

from dataclasses import replace

from cairn.storage.logs.step_log import Heartbeat, heartbeat_key, read_heartbeat, write_heartbeat
from cairn.storage.stores.object_store import ObjectStore

BEAT = Heartbeat(attempt=1, beat=3, step=7, train_loss=2.5, tokens=70, gpu_seconds=1.5)


def test_a_heartbeat_reads_back_as_written_last(store: ObjectStore) -> None:
    write_heartbeat(store, "runs/r1", Heartbeat(attempt=1, beat=2, step=6, train_loss=None, tokens=60, gpu_seconds=1))
    write_heartbeat(store, "runs/r1", BEAT)
    assert read_heartbeat(store, "runs/r1", 1) == BEAT


def test_attempts_have_heartbeats_of_their_own(store: ObjectStore) -> None:
    write_heartbeat(store, "runs/r1", BEAT)
    assert read_heartbeat(store, "runs/r1", 2) is None


def test_the_heartbeat_of_another_runs_attempt_of_this_number_counts_as_none(store: ObjectStore) -> None:
    write_heartbeat(store, "runs/r1", replace(BEAT, claim_id="theirs"))
    assert read_heartbeat(store, "runs/r1", 1, "ours") is None
    assert read_heartbeat(store, "runs/r1", 1, "theirs") is not None


def test_a_heartbeat_that_cannot_be_read_counts_as_none(store: ObjectStore) -> None:
    store.write(heartbeat_key("runs/r1", 1), b'{"attempt": ')
    assert read_heartbeat(store, "runs/r1", 1) is None


def test_a_loss_that_is_not_a_number_does_not_stop_the_heart(store: ObjectStore) -> None:
    write_heartbeat(
        store, "runs/r1", Heartbeat(attempt=1, beat=1, step=1, train_loss=float("nan"), tokens=1, gpu_seconds=1.0)
    )
    beat = read_heartbeat(store, "runs/r1", 1)
    assert beat is not None
    assert beat.train_loss is None
