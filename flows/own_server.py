"""Prefect's own server for one command: a child process that dies with it, however it dies.

Owns its port, its environment and its end: end of file on stdin ends it at once, as it does the trainer. Deaf to Ctrl-C
and to a terminal that is closed: it shares the terminal's process group, so both would kill it before the flow has said
good-bye. Run as `python -m flows.own_server`, with the listening socket's number as its only word.
Why not the one Prefect starts by itself: that one is stopped by its parent's last words alone, so a killed command
leaves it running for ever.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping

_START_SECONDS = 180.0
_STOP_SECONDS = 5.0
_SERVES_NO_PAGES = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


class OwnServer:
    """A server that is starting or runs; it is stopped when this process ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it with this environment; `wait_ready` says when it answers."""
        with socket.create_server(("127.0.0.1", 0)) as listening:  # bound here: nobody else can take the port meanwhile
            self.api_url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            self._child = subprocess.Popen(
                [sys.executable, "-m", "flows.own_server", str(listening.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(listening.fileno(),),
                env={**environment, **_SERVES_NO_PAGES},
            )
        atexit.register(self.stop)

    def wait_ready(self) -> None:
        """Wait until it answers; raises RuntimeError where it ended instead, or is not there in three minutes."""
        try:  # the socket listens already: the answer comes as soon as there is somebody to give it
            with urllib.request.urlopen(f"{self.api_url}/health", timeout=_START_SECONDS):
                return
        except (urllib.error.URLError, OSError) as error:
            self.stop()
            raise RuntimeError(f"Prefect's own server did not start: {error}; set PREFECT_API_URL") from error

    def stop(self) -> None:
        """Stop it, gently at first; one that has ended is no error."""
        self._child.terminate()
        try:
            self._child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        atexit.unregister(self.stop)


def main() -> None:
    """Serve until the parent is gone or says stop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    threading.Thread(target=_die_with_parent, name="parent", daemon=True).start()
    import uvicorn
    from prefect.server.api.server import create_app

    config = uvicorn.Config(create_app, factory=True, log_level="error", lifespan="on")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])


def _die_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
