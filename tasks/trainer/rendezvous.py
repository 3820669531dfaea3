"""Where the processes of one attempt leave each other small things: names and bytes in torchrun's own store.

Owns the names' space and the waiting. The store lives in torchrun's agent on the first node, so it outlives any rank.
Refuses to know what is left there. Waiting asks now and again instead of holding the line: several threads share it.
"""

import os
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_ASK_SECONDS = 0.02
_PATIENCE = timedelta(minutes=5)


class Rendezvous:
    """The store that every rank of an attempt reaches."""

    def __init__(self) -> None:
        """Reach it where torchrun's environment says."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = TCPStore(host, port, None, False, timeout=_PATIENCE)
        self._left = PrefixStore("cairn", self.store)

    def leave(self, name: str, data: bytes) -> None:
        """Leave bytes under a name, over what was there."""
        self._left.set(name, data)  # type: ignore[arg-type] # the stub knows text only

    def has(self, name: str) -> bool:
        """Whether anything was left under the name."""
        return bool(self._left.check([name]))

    def take(self, name: str, *, patience_seconds: float = float("inf")) -> bytes | None:
        """Wait until something was left under the name and return it, which leaves it there; None if nothing came."""
        until = time.monotonic() + patience_seconds
        while not self.has(name):
            if time.monotonic() > until:
                return None
            time.sleep(_ASK_SECONDS)
        return bytes(self._left.get(name))

    def forget(self, name: str) -> None:
        """Take away what was left under the name."""
        self._left.delete_key(name)
