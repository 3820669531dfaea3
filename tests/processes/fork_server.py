"""Starts a Python program in a process forked from one that has imported torch, Prefect and Cairn already.

The new process is a real child of the one that asks, with its own process id, files, environment, command line and
exit code; the seconds of importing are saved, and those of fsync, since a killed process loses no page of the cache.
`PROGRAMS` lists what can be started so; its own children of these programs are forked as well. A light server has only
the modules that it is started for, and forks these alone, also where they are called in a bounded child. Some tests
start their commands without it, so that the true start stays tested.
"""

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHILD = "cairn.storage.stores.child_process"
"""Runs the program that its first argument names, for as long as its parent runs."""
BOUNDED = "--bounded"
"""In place of a program's name: a call with bounded memory and time (`bounded_command`)."""
PROGRAMS = frozenset(
    {
        "cairn.cli.command",
        "cairn.flows.orchestrator.prefect_server",
        "cairn.tasks.evaluator.evaluator",
        "cairn.tasks.trainer.trainer_group",
        "cairn.tasks.trainer.trainer",
        "tests.programs.chaos.rank_launcher",
        "tests.programs.chaos.rank_victim",
        "tests.crash.framed_command",
        "tests.crash.noticed_command",
        "tests.crash.one_file_process",
        "tests.model.process_settings",
        "tests.model.rank_legs",
        "tests.tasks.rank_resume",
        "tests.tasks.real_ends.scenes",
        "tests.tasks.staging_memory",
        "tests.wiring.tensorless_trainer",
    }
)
ROOT = Path(__file__).parents[2]
SYNCS = "CAIRN_TEST_SYNCS"
"""The variable of a forked process whose fsync is the system's."""
DRAWS = "CAIRN_TEST_DRAWS"
"""The variable of a forked process that draws the curves on a run's page: others show a point, and spend no second."""
SMALL_PRODUCTS = (256,)
"""Sizes of the matrices by which a trainer of a test measures its peak: others take 0.3 s of a core in each process."""
PADDING = 4096
"""Bytes of command line and of environment that a fork server sets aside, for those of the processes it forks."""
_LARGEST_REQUEST = 1 << 18
_SINGLE_THREAD = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
}
_PATCHING = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkRequest:
    """What a forked process is to run; its files come beside it and take the numbers in `descriptors`."""

    words: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    descriptors: tuple[int, ...]
    new_session: bool

    def encode(self) -> bytes:
        """Return the request as JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()


def decode_request(data: bytes) -> ForkRequest:
    """Return the request that `encode` wrote."""
    fields = json.loads(data)
    return ForkRequest(**{**fields, "words": tuple(fields["words"]), "descriptors": tuple(fields["descriptors"])})


class ForkServer:
    """One process that has everything imported, or these modules alone, and forks at request."""

    def __init__(self, environment: Mapping[str, str], *modules: str) -> None:
        """Start it, and wait until its imports are done."""
        self._programs = frozenset(modules) or PROGRAMS
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", "tests.processes.forking", str(theirs.fileno()), "x" * PADDING, *modules]
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**environment, **_SINGLE_THREAD, "PADDING": "x" * PADDING},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket.recv(64)

    def close(self) -> None:
        """End it; what it has forked lives on."""
        self._socket.close()
        self._process.wait()

    def popen(self, words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start `words` as `subprocess.Popen` does, forked if they name one of the server's programs."""
        with self.forking():
            return subprocess.Popen(words, **options)

    @contextmanager
    def forking(self) -> Iterator[None]:
        """Fork what this process starts within the block, where it is one of the server's programs."""
        with _PATCHING:
            exec_process, spawns = subprocess._fork_exec, subprocess._USE_POSIX_SPAWN  # type: ignore[attr-defined]
            subprocess._fork_exec = ForkExec(self._socket, exec_process, self._programs)  # type: ignore[attr-defined]
            subprocess._USE_POSIX_SPAWN = False  # the other way to start a process, common since Python 3.13
            try:
                yield
            finally:
                subprocess._fork_exec, subprocess._USE_POSIX_SPAWN = exec_process, spawns  # type: ignore[attr-defined]


@functools.cache
def fork_server(*modules: str) -> ForkServer:
    """The fork server of this process, started at the first call and ended with the process.

    One for a few `modules` alone starts in half a second, and forks in a tenth of the time.
    """
    server = ForkServer(os.environ, *modules)
    atexit.register(server.close)
    return server


class ForkExec:
    """In the place of the function by which `subprocess.Popen` starts a process: asks a fork server, where that can."""

    def __init__(self, server: socket.socket, exec_process: Any, programs: frozenset[str] = PROGRAMS) -> None:
        """Ask `server`; what is not one of `programs` is started by `exec_process`, the function replaced."""
        self._server, self._exec_process, self._lock = server, exec_process, threading.Lock()
        self._programs = programs

    def __call__(self, words: Sequence[Any], *arguments: Any) -> int:
        """Start a process and return its id; the arguments are those of `_posixsubprocess.fork_exec`."""
        command = [os.fsdecode(word) for word in words]
        if name_of_program(words_of_program(command)) not in self._programs:
            return int(self._exec_process(words, *arguments))
        _, _, kept, folder, environment, stdin, _, _, stdout, _, stderr, _, error_pipe, _, new_session = arguments[:15]
        own = [number for number in kept if number != error_pipe]
        streams = [stream if stream >= 0 else number for number, stream in enumerate((stdin, stdout, stderr))]
        variables = dict(os.fsdecode(item).split("=", 1) for item in environment) if environment else dict(os.environ)
        request = ForkRequest(
            words=tuple(command),
            folder=os.fsdecode(folder) if folder else os.getcwd(),
            environment=variables,
            descriptors=(0, 1, 2, *own),
            new_session=bool(new_session),
        )
        with self._lock:
            socket.send_fds(self._server, [request.encode()], [*streams, *own])
            answer = int(self._server.recv(64))
        if answer < 0:
            raise OSError(-answer, f"the fork server was refused a process: {os.strerror(-answer)}")
        return answer


def words_of_program(command: Sequence[str]) -> Sequence[str]:
    """Return a program's module and arguments, without the child's own part; none for another kind of command."""
    if command[0] != sys.executable or "-m" not in command[1:3]:
        return ()
    words = command[command.index("-m") + 1 :]
    return words[1:] if words[0] == CHILD else words


def name_of_program(words: Sequence[str]) -> str:
    """Return the module that these words of a program name, that of a bounded child too; empty without words."""
    return str(json.loads(words[1])[2]) if BOUNDED in words[:1] else next(iter(words), "")


def receive_request(server: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """Wait for a request and return it with its files; None if nobody can ask any more."""
    data, files, _, _ = socket.recv_fds(server, _LARGEST_REQUEST, 16)
    return (decode_request(data), files) if data else None
