"""A small key-value store that every rank of an attempt reaches: torchrun's TCPStore, in the first node's agent.

It outlives any rank. `get` polls instead of blocking in the store, because several threads share the connection.
"""

import os
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_POLL_SECONDS = 0.02
_TIMEOUT = timedelta(minutes=5)


class Rendezvous:
    """The ranks' key-value store; `store` is torch's, for the process group."""

    def __init__(self) -> None:
        """Connect to the address in torchrun's environment."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = TCPStore(host, port, None, False, timeout=_TIMEOUT)
        self._values = PrefixStore("cairn", self.store)

    def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name, over earlier ones."""
        self._values.set(name, data)  # type: ignore[arg-type] # the stub knows text only

    def get(self, name: str, *, timeout_seconds: float = float("inf")) -> bytes | None:
        """Wait for the bytes under a name and return them; None after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self._values.check([name]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return bytes(self._values.get(name))
