"""The heartbeat of an attempt: a rewritten object that says "still here", for liveness only, never for safety.

A claimant watches it on its own monotonic clock; nobody compares clocks between hosts.
"""

from dataclasses import dataclass

from storage.errors import IntegrityError, ObjectMissing
from storage.stores.document import decode, encode
from storage.stores.object_store import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """How far an attempt says it is; `beat` rises with every write."""

    attempt: int
    beat: int
    step: int
    train_loss: float | None
    tokens: int
    gpu_seconds: float


def heartbeat_key(run_prefix: str, attempt: int) -> str:
    """Return the key of an attempt's heartbeat."""
    return f"{run_prefix}/heartbeats/attempt-{attempt:04d}.json"


def write_heartbeat(store: ObjectStore, run_prefix: str, heartbeat: Heartbeat) -> None:
    """Rewrite the attempt's heartbeat object."""
    store.write(heartbeat_key(run_prefix, heartbeat.attempt), encode(heartbeat))


def read_heartbeat(store: ObjectStore, run_prefix: str, attempt: int) -> Heartbeat | None:
    """Return the attempt's last heartbeat, or None where there is none to be read."""
    key = heartbeat_key(run_prefix, attempt)
    try:
        return decode(store.read(key), Heartbeat, where=key)
    except (ObjectMissing, IntegrityError):
        return None
