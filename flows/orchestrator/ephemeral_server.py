"""A temporary Prefect server for one command: a child process that ends with the command, however that ends.

Its address is known before it answers: the socket listens from the start, so there is no race for a port. It ignores
signals, which a terminal or scheduler sends to every process of a job; end of file on stdin ends it. The temporary
server that Prefect itself starts outlives a killed command, and its parent has to import all of the server first.
Run as `python -m flows.orchestrator.ephemeral_server` with the socket's number as its only argument.
"""

import atexit
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from flows.orchestrator.server_address import is_server_answering

if TYPE_CHECKING:
    from uvicorn import Server

_MARK = "CAIRN_EPHEMERAL_SERVER"
"""Holds the server's address: the command's flows see that it has no pages and that nobody else knows it."""
_START_SECONDS = 180.0
_STOP_SECONDS, _FLUSH_SECONDS = 8.0, 5.0
_ANSWER_SECONDS, _POLL_SECONDS = 10.0, 0.1
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SERVER = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    # The catalogue of block types is only for the UI, and takes a second.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
}
# Checked twice a minute, automations that wait for something not to happen take little CPU from training.
_SERVER_MAY = {"PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT30S"}


class EphemeralServer:
    """A server that is starting or runs; it is stopped when this process ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it with this environment; `wait_ready` says when it answers."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.api_url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            self._child = subprocess.Popen(
                [sys.executable, "-m", "flows.orchestrator.ephemeral_server", str(listening.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(listening.fileno(),),
                env={**_SERVER_MAY, **environment, **_SERVER},
            )
        atexit.register(self.stop)

    def name_in(self, environment: MutableMapping[str, str]) -> None:
        """Set it as the server for every later import of Prefect with this environment."""
        environment["PREFECT_API_URL"] = environment[_MARK] = self.api_url

    def forget_in(self, environment: MutableMapping[str, str]) -> None:
        """Undo `name_in`."""
        for name in ("PREFECT_API_URL", _MARK):
            environment.pop(name, None)

    def wait_ready(self) -> None:
        """Wait until it answers; raises RuntimeError if it ends instead, or has not answered in three minutes."""
        deadline = time.monotonic() + _START_SECONDS
        # The listening socket keeps the request until the server answers it.
        while not is_server_answering(self.api_url, timeout_seconds=_ANSWER_SECONDS, proxies=False):
            time.sleep(_POLL_SECONDS)
            code = self._child.poll()
            if code is not None or time.monotonic() > deadline:
                self.stop()
                why = f"it ended with code {code}" if code is not None else f"no answer in {_START_SECONDS:.0f} s"
                raise RuntimeError(f"the temporary Prefect server did not start: {why}; set PREFECT_API_URL to another")

    def stop(self) -> None:
        """Stop it, by SIGKILL if it takes too long; one that has ended is no error."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        atexit.unregister(self.stop)


def is_ephemeral_server(environment: Mapping[str, str]) -> bool:
    """Whether the named server is a command's temporary one, where no person can answer or cancel anything."""
    return _MARK in environment and environment[_MARK] == environment.get("PREFECT_API_URL")


def main() -> None:
    """Serve until standard input ends."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    served: list[Server] = []
    threading.Thread(target=_end_with_parent, args=(served,), name="parent", daemon=True).start()
    gc.disable()  # collecting garbage among what stays would be a fifth of the start
    import uvicorn
    from prefect.server.api.server import create_app

    server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error", lifespan="on"))
    gc.freeze()
    gc.enable()
    served.append(server)
    listening = socket.socket(fileno=int(sys.argv[1]))
    # Outside the main thread uvicorn leaves the signal handlers alone.
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="server")
    serving.start()
    serving.join()
    sys.exit(0 if server.should_exit else 1)


def _end_with_parent(served: "list[Server]") -> None:
    sys.stdin.buffer.read()
    if not served:
        os._exit(0)  # it has received nothing yet
    served[0].should_exit = True  # what it has received is written first
    time.sleep(_FLUSH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
