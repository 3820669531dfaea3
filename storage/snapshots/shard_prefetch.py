"""Shards of a large snapshot verified in the background, several at a time, before they are asked for.

A shuffled order needs every shard within its first steps; fetched one after another, by whoever asks first, the links
to an object store stay idle. Owns only the order and the number at once. What is damaged stays the finding of who uses
it: nothing is reported from here, and a shard that is asked for meanwhile is waited for where it is.
"""

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from storage.errors import StorageError
from storage.snapshots.verified_shard import VerifiedShard


def verify_ahead(shards: Iterable[VerifiedShard], *, threads: int) -> None:
    """Verify the shards in order, `threads` at a time, without waiting for them; the process may end meanwhile."""
    waiting = deque(shard for shard in shards if not shard.is_verified)
    for number in range(min(threads, len(waiting))):
        threading.Thread(target=_verify, args=(waiting,), name=f"verify-ahead-{number}", daemon=True).start()


def _verify(waiting: deque[VerifiedShard]) -> None:
    while True:
        try:
            shard = waiting.popleft()
        except IndexError:
            return
        with suppress(StorageError, OSError):  # whoever asks for the shard is told
            shard.tokens()
