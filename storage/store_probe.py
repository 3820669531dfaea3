"""Does create-if-absent really exclude here? A real race, run before a store is trusted with a run log.

Owns the question and the verdict; the store's answer to parallel creators is the only evidence it accepts.
"""

import uuid
from concurrent.futures import ThreadPoolExecutor

from storage.errors import StoreUnsound
from storage.object_store import ObjectStore


def probe_store(store: ObjectStore, *, creators: int = 8, rounds: int = 2) -> None:
    """Race `creators` creates of one key for some rounds; raise `StoreUnsound` unless each has exactly one winner.

    A store that cannot be written raises its own `StoreUnavailable`. The probe's objects are deleted again.
    """
    with ThreadPoolExecutor(creators) as pool:
        for _ in range(rounds):
            key = f"probe/{uuid.uuid4().hex}.json"
            try:
                outcomes = list(pool.map(lambda n, key=key: (n, store.create(key, b"%d" % n)), range(creators)))
                winners = [n for n, created in outcomes if created]
                if len(winners) != 1 or store.read(key) != b"%d" % winners[0]:
                    raise StoreUnsound(
                        f"{store.url}: create-if-absent does not exclude: {len(winners)} of {creators} racing creators "
                        "were told they had won; the store ignores If-None-Match, so choose another one"
                    )
            finally:
                store.delete(key)
