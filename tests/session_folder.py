"""What the processes of one test session share: a folder with locks, the values made once, and servers to end with it.

The first process makes the folder and names it in the environment; the workers of pytest-xdist inherit the name.
"""

import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_VARIABLE = "CAIRN_TEST_SESSION"


def open_session() -> bool:
    """Make the folder, unless the process that started this one has; returns whether this process made it."""
    if _VARIABLE in os.environ:
        return False
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="cairn-session-")
    return True


def close_session() -> None:
    """End the servers that were started for the session, and remove its folder."""
    folder = Path(os.environ.pop(_VARIABLE))
    for path in folder.glob("*.pid"):
        with suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def session_folder() -> Path:
    """The folder that all processes of the session share."""
    return Path(os.environ[_VARIABLE])


def once(name: str, make: Callable[[], str]) -> str:
    """Return the text that `make` returned in the first process of the session that asked for it."""
    path = session_folder() / f"{name}.json"
    with _locked(path.with_suffix(".lock")):
        if not path.exists():
            path.write_text(json.dumps(make()), encoding="utf-8")
        return str(json.loads(path.read_text(encoding="utf-8")))


def end_with_session(process_group: int) -> None:
    """Have this process group killed at the end of the session."""
    (session_folder() / f"{process_group}.pid").write_text(str(process_group), encoding="utf-8")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
