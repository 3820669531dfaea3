"""The heartbeat of an attempt, rewritten every few seconds: for liveness by the reader's clock, never for safety."""

from dataclasses import dataclass
from datetime import datetime

from storage.errors import IntegrityError, ObjectMissing
from storage.logs.run_entries import DevicePeak
from storage.stores.document import decode, encode
from storage.stores.object_store import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The progress of an attempt; `beat` rises with every write, `tokens` and `gpu_seconds` count from its start.

    `at` is the writer's clock, for accounts only. `symptom` says what is wrong with the training now, if anything.
    """

    attempt: int
    beat: int
    step: int
    train_loss: float | None
    tokens: int
    gpu_seconds: float
    at: datetime | None = None
    peak: DevicePeak | None = None
    starting_seconds: float | None = None
    symptom: str = ""


def heartbeat_key(run_prefix: str, attempt: int) -> str:
    """Return the key of an attempt's heartbeat."""
    return f"{run_prefix}/heartbeats/attempt-{attempt:04d}.json"


def write_heartbeat(store: ObjectStore, run_prefix: str, heartbeat: Heartbeat) -> None:
    """Rewrite the attempt's heartbeat."""
    store.write(heartbeat_key(run_prefix, heartbeat.attempt), encode(heartbeat))


def silent_seconds(store: ObjectStore, run_prefix: str, attempt: int) -> float | None:
    """Return for how long the attempt has written no heartbeat, by the store's clock; None if that cannot be told."""
    return store.age_seconds(heartbeat_key(run_prefix, attempt))


def read_heartbeat(store: ObjectStore, run_prefix: str, attempt: int) -> Heartbeat | None:
    """Return the attempt's last heartbeat, or None if it is missing or unreadable."""
    key = heartbeat_key(run_prefix, attempt)
    try:
        return decode(store.read(key), Heartbeat, where=key)
    except (ObjectMissing, IntegrityError):
        return None
