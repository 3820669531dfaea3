"""Serves the live page on the loopback until it is interrupted."""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import work_folder

_MOST_READING_SECONDS = 2.0  # the logs of 1,000 runs take less where they were never folded


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveAddress:
    """Where the live page is, and the store that it shows."""

    address: str
    store: str


def serve(
    store: ObjectStore, *, port: int, environment: Mapping[str, str], announce: Callable[[LiveAddress], None]
) -> None:
    """Listen on 127.0.0.1, any free port for 0, announce the address once the runs were read, answer until Ctrl-C.

    Raises `InvalidConfiguration` where the port is taken or the plotting library is not installed. Training on this
    machine comes first: this process has a lower priority.
    """
    if find_spec("plotly") is None:
        raise InvalidConfiguration("cairn ui needs the package plotly: pip install 'cairn-train[ui]'")
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "must be 0 to 65535"
        raise InvalidConfiguration(f"--port {port}: {why}; choose another one, or 0 for any that is free") from error
    with listening:
        import uvicorn

        from cairn.ui.live_app import ViewCache, look_at_overview, make_app

        os.nice(10)
        cache, work = ViewCache(), work_folder(environment)
        app = make_app(store, environment=environment, work=work, cache=cache)
        quiet = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, proxy_headers=False
        )
        reading = threading.Thread(target=look_at_overview, args=[store, work, cache], daemon=True)
        with suppress(KeyboardInterrupt):
            reading.start()
            reading.join(_MOST_READING_SECONDS)
            announce(LiveAddress(address="http://{}:{}/".format(*listening.getsockname()), store=store.url))
            uvicorn.Server(quiet).run(sockets=[listening])
