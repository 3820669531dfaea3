"""The home of Cairn's own Prefect server: who serves it, who uses it, and where the server answers.

Locks (flock) say both, so that a process that was killed has let go. `make up` and the temporary servers of commands
serve the same home, one at a time; a temporary one ends when no command uses it, or when `make up` asks for the home.
Run as `python -P -m cairn.flows.orchestrator.server_home`, it prints the path of the file with the address.
"""

import fcntl
import os
import shlex
import uuid
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from cairn.flows.orchestrator.prefect_settings import prefect_home

_EPHEMERAL = "CAIRN_EPHEMERAL_SERVER"
"""Holds the address of a temporary server, which has no pages; stands beside it in the file and the environment."""
_SERVING, _USING, _HANDOVER = "serving.lock", "using.lock", "handover"


class ServerHome:
    """One folder; a lock is a file descriptor, and let go by closing all its copies."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, for this user alone; raises OSError where that is not possible."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder}: belongs to another user")
        folder.chmod(0o700)
        self.folder = folder

    @property
    def address_file(self) -> Path:
        """A line for a shell that names the server and its password, readable by this user alone, while one serves."""
        return self.folder / "server"

    def lock_serving(self) -> int | None:
        """Return the lock of the one server; None while another serves."""
        return _lock(self.folder / _SERVING, fcntl.LOCK_EX)

    def lock_using(self) -> int | None:
        """Return one lock of many, that of a command that uses the server; None while a temporary server ends."""
        return _lock(self.folder / _USING, fcntl.LOCK_SH)

    def lock_unused(self) -> int | None:
        """Return a lock that lets no command use the server any more; None while one does."""
        return _lock(self.folder / _USING, fcntl.LOCK_EX)

    def ask_for_handover(self) -> None:
        """Ask a temporary server to end, whoever uses it."""
        (self.folder / _HANDOVER).touch()

    def is_handover_asked(self) -> bool:
        """Whether a temporary server is to end."""
        return (self.folder / _HANDOVER).exists()

    def end_handover(self) -> None:
        """Let temporary servers serve again, later."""
        (self.folder / _HANDOVER).unlink(missing_ok=True)

    def write_address(self, api_url: str, password: str, *, is_ephemeral: bool) -> None:
        """Replace the address file; a link that lies there is replaced, never followed."""
        variables = {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": password}
        variables |= {_EPHEMERAL: api_url} if is_ephemeral else {}
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        beside = self.folder / f".{uuid.uuid4().hex}"
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as written:
            written.write(f"export {' '.join(words)}\n")
        beside.replace(self.address_file)

    def read_address(self) -> dict[str, str]:
        """Return the variables that name the server; none where no server has left them."""
        with suppress(OSError, ValueError):
            return dict(word.split("=", 1) for word in shlex.split(self.address_file.read_text(encoding="utf-8"))[1:])
        return {}

    def remove_address(self) -> None:
        """Remove the file with the password."""
        self.address_file.unlink(missing_ok=True)


def is_ephemeral_server(environment: Mapping[str, str]) -> bool:
    """Whether the named server is a command's temporary one, where no person can answer or cancel anything."""
    return _EPHEMERAL in environment and environment[_EPHEMERAL] == environment.get("PREFECT_API_URL")


def forget_server(environment: MutableMapping[str, str]) -> None:
    """Name no server in the environment."""
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", _EPHEMERAL):
        environment.pop(name, None)


def _lock(path: Path, kind: int) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def main() -> None:
    """Print where the address of the server that serves Cairn's home is written."""
    print(ServerHome(prefect_home(os.environ)).address_file)


if __name__ == "__main__":
    main()
