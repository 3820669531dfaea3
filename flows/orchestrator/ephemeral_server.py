"""Prefect's own server for one command: a child process that starts beside it and dies with it, however it dies.

Owns its port, its environment and its end. The address is known before anybody answers there: the socket listens from
the first moment, so nobody races for a port, and who asks early is answered late. Run as
`python -m flows.orchestrator.ephemeral_server` with the socket's number as its only argument.
It hears no signal: a terminal and a scheduler send theirs to every process
of a job, and the flow has not said good-bye yet; end of file on stdin ends it.
Why not the one Prefect starts by itself: that one is stopped by its parent's last words alone, so a killed command
leaves it running for ever; and its parent must first import all of the server to start it.
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
import urllib.error
import urllib.request
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn import Server

_OWN = "CAIRN_OWN_SERVER"
"""Set by whoever starts one, to its address: its flows see that it has no pages and that nobody else knows of it."""
_START_SECONDS = 180.0
_STOP_SECONDS, _GOOD_BYE_SECONDS = 8.0, 5.0
_ASK_SECONDS, _LOOK_SECONDS = 10.0, 0.1
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SERVER = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    # The catalogue of block types is for pages; making it takes a second.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
}
# Automations that wait for something not to happen: asked twice a minute, they take little from training.
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
        """Name it for everybody who imports Prefect with this environment from now on."""
        environment["PREFECT_API_URL"] = environment[_OWN] = self.api_url

    def forget_in(self, environment: MutableMapping[str, str]) -> None:
        """Name it no longer."""
        for name in ("PREFECT_API_URL", _OWN):
            environment.pop(name, None)

    def wait_ready(self) -> None:
        """Wait until it answers; raises RuntimeError where it ended instead, or is not there in three minutes."""
        deadline = time.monotonic() + _START_SECONDS
        while not _is_healthy(self.api_url):
            code = self._child.poll()
            if code is not None or time.monotonic() > deadline:
                self.stop()
                why = f"it ended with code {code}" if code is not None else f"no answer in {_START_SECONDS:.0f} s"
                raise RuntimeError(f"Prefect's own server did not start: {why}; set PREFECT_API_URL to another")

    def stop(self) -> None:
        """Stop it, gently at first; one that has ended is no error."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        atexit.unregister(self.stop)


def is_ephemeral_server(environment: Mapping[str, str]) -> bool:
    """Whether the server that is named is a command's own: nobody can be asked there, and nobody cancels there."""
    return _OWN in environment and environment[_OWN] == environment.get("PREFECT_API_URL")


def _is_healthy(api_url: str) -> bool:
    """Ask and wait: a socket that listens keeps the question until somebody is there to answer it."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{api_url}/health", timeout=_ASK_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True  # somebody is there, whatever the answer is
    except OSError:
        time.sleep(_LOOK_SECONDS)
        return False


def main() -> None:
    """Serve until standard input ends."""
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    served: list[Server] = []
    threading.Thread(target=_end_with_parent, args=(served,), name="parent", daemon=True).start()
    gc.disable()  # a fifth of the start would be looking for garbage among what is there to stay
    import uvicorn
    from prefect.server.api.server import create_app

    server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error", lifespan="on"))
    gc.freeze()
    gc.enable()
    served.append(server)
    listening = socket.socket(fileno=int(sys.argv[1]))
    # In a thread beside the main one uvicorn leaves the signals as they are.
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="server")
    serving.start()
    serving.join()
    sys.exit(0 if server.should_exit else 1)


def _end_with_parent(served: "list[Server]") -> None:
    sys.stdin.buffer.read()
    if not served:
        os._exit(0)  # nobody has told it anything yet
    served[0].should_exit = True  # what it was told is written down first
    time.sleep(_GOOD_BYE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
