"""The Prefect server that shows the runs of one command; that there is none is never a reason for anything."""

import atexit
import fcntl
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

from cairn.flows.orchestrator import prefect_settings
from cairn.flows.orchestrator.prefect_server import ServerHome, TemporaryServer, is_ephemeral_server
from cairn.storage.stores.child_process import temporary_folder
from cairn.tasks.errors import InvalidConfiguration

TEMPORARY = "a temporary Prefect server shows this run (PREFECT_API_URL names a running one)"
_ABSENT_SECONDS = 10.0  # a server that restarts is back in about this time; starting a temporary one takes as long
_BUSY_SECONDS, _STOP_SECONDS, _POLL_SECONDS = 15.0, 8.0, 0.1


class SessionServer:
    """The server that is named, else the one that serves Cairn's home, else a temporary one of this command's own.

    A temporary server gets a listening socket that is made here, so its address is known before it answers, and no
    other program can take the port. It lives as long as a command uses it; once it has died, the command has none.
    """

    def __init__(self, environment: MutableMapping[str, str], *, say: Callable[[str], None]) -> None:
        """Settle Prefect's settings in this environment; `say` is called once when there is no server any more."""
        self._environment, self.say = environment, say
        self._own: TemporaryServer | None = None
        self._using: int | None = None
        self._is_lost = self._is_stopping = False
        settle_client(environment, say=say)

    @property
    def api_url(self) -> str:
        """The address, known before the server answers; empty where there is no server."""
        return self._environment.get("PREFECT_API_URL", "")

    @property
    def is_ephemeral(self) -> bool:
        """Whether it is a temporary one, of this command or of another."""
        return is_ephemeral_server(self._environment)

    @property
    def is_lost(self) -> bool:
        """Whether there is none any more."""
        if self._using is not None and not self._is_lost and not _is_listening(self.api_url):
            self._lose("it has ended")
        return self._is_lost

    def choose(self) -> None:
        """Name the server in the environment; raises `InvalidConfiguration` for a named one that refuses."""
        if self._using is None and not self._is_lost:
            self._choose()
            # Nothing starts a temporary server again: a request is given up after two seconds, else after fifteen.
            prefect_settings.quieten_prefect(self._environment, retries=1 if self.is_ephemeral else 4)

    def _choose(self) -> None:
        began = time.monotonic()
        while self.api_url:
            with suppress(OSError):
                prefect_settings.ask_server(self._environment, timeout_seconds=3.0)
                return
            if time.monotonic() - began >= _ABSENT_SECONDS:
                self.say(f"no Prefect server answers at {self.api_url}: this run is not shown there")
                break
            time.sleep(1.0)
        prefect_settings.forget_server(self._environment)
        prefect_settings.connect_directly(self._environment)
        with suppress(OSError):
            if self._join(ServerHome(prefect_settings.prefect_home(self._environment)), _BUSY_SECONDS):
                return
        # A home that cannot be used, or is served where this process cannot reach it, costs what it would remember.
        own = ExitStack()
        folder = own.enter_context(temporary_folder("cairn-prefect-"))
        atexit.register(own.close)  # before what watches the folder is ended, which was registered before
        if not self._join(ServerHome(folder), 0.0):
            self._lose(f"no file in {folder} can be locked")

    def start(self) -> None:
        """Start the temporary server, if that is the command's own and was not started; returns at once."""
        if self._own is None or self._own.child is not None:
            return
        try:
            child = self._own.start(self._environment)
        except OSError as error:
            self._lose(str(error))
            return
        watched = (child, self._own.log)
        threading.Thread(target=self._await_end, args=watched, name="prefect-server", daemon=True).start()

    def wait_ready(self, timeout_seconds: float = 180.0) -> bool:
        """Start it where needed and wait until it answers; False, once the reason was said, if it cannot be had."""
        self.start()
        until = time.monotonic() + timeout_seconds
        while not self.is_lost:
            left = until - time.monotonic()
            try:
                prefect_settings.ask_server(self._environment, timeout_seconds=max(_POLL_SECONDS, left))
                return True
            except InvalidConfiguration as error:  # it did not refuse before
                self._lose(str(error))
            except OSError:
                pass
            if left <= 0:
                self._lose(f"no answer in {timeout_seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        return False

    def stop(self) -> None:
        """Let the server go: a temporary one that no other command uses ends, and is waited for."""
        self._is_stopping = True
        if self._using is not None:
            is_used = True
            with suppress(OSError):  # another command has a lock too
                fcntl.flock(self._using, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_used = False
            os.close(self._using)
            self._using = None
            if self._own is not None and (self._own.child is None or not is_used):
                self._own.await_end(0.0 if self._is_lost else _STOP_SECONDS)
        atexit.unregister(self.stop)

    def _join(self, home: ServerHome, most_seconds: float) -> bool:
        """Use the server of the home, or be the one that starts it; False if neither is possible in time."""
        until = time.monotonic() + most_seconds
        while True:
            if (using := home.lock_using()) is not None:
                address = home.read_address()
                if (serving := home.lock_serving()) is not None:
                    self._own = TemporaryServer(home, serving)
                    atexit.register(self.stop)
                    self._environment.update(home.read_address())
                    self.say(TEMPORARY)
                elif address and _is_listening(address["PREFECT_API_URL"]):
                    self._environment.update(address)
                else:
                    os.close(using)
                    using = None
            if using is not None or time.monotonic() >= until:
                self._using = using
                return using is not None
            time.sleep(_POLL_SECONDS)

    def _await_end(self, child: "subprocess.Popen[bytes]", log: Path) -> None:
        code = child.wait()
        self._lose(f"it ended with code {code} ({log} has its words)")

    def _lose(self, why: str) -> None:
        if not self._is_lost and not self._is_stopping:
            self._is_lost = True
            self.say(f"the Prefect server is gone, {why}: this run goes on and its pages miss the rest")
            prefect_settings.forget_server(self._environment)


def settle_client(environment: MutableMapping[str, str], *, say: Callable[[str], None]) -> None:
    """Settle Prefect's settings in this environment, with the server of a running `make up` where none is named."""
    prefect_settings.settle_prefect(environment, say=say)
    if not environment.get("PREFECT_API_URL"):
        with suppress(OSError):
            address = ServerHome(prefect_settings.prefect_home(environment)).read_address()
            if address and not is_ephemeral_server(address) and _is_listening(address["PREFECT_API_URL"]):
                prefect_settings.forget_server(environment)
                environment.update(address)
                prefect_settings.connect_directly(environment)


def _is_listening(api_url: str) -> bool:
    parts = urlsplit(api_url)
    with suppress(OSError), socket.create_connection((parts.hostname or "", parts.port or 80), timeout=3.0):
        return True
    return False
