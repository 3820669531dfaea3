"""The fork server itself: `python -m tests.processes.forking SOCKET PADDING [MODULES]` (see `fork_server`).

A forked process becomes a child of the process that asked by clone(2) with CLONE_PARENT, so that it can be waited for
and killed like any other. A process that runs `cairn` or a launcher of ranks gets a fork server of its own for its
children, forked before it has threads.
"""

import atexit
import base64
import ctypes
import fcntl
import functools
import gc
import importlib
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cairn.storage.stores import child_process
from tests.processes import stacks
from tests.processes.fork_server import (
    BOUNDED,
    CHILD,
    DRAWS,
    PROGRAMS,
    SMALL_PRODUCTS,
    SYNCS,
    ForkExec,
    ForkRequest,
    receive_request,
    words_of_program,
)

_CLONE_PARENT = 0x8000
_SYSCALL_CLONE = {"x86_64": 56, "aarch64": 220}[platform.machine()]
_FIRST_MOVED = 200
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_THREAD_BYTES = 4096
_IMPORTS = (
    "anyio._backends._asyncio",
    "cairn.operations.prefect_session",
    "encodings.idna",
    "fastapi",
    "cairn.flows.preparation.preflight",
    "cairn.flows.run.node_service",
    "cairn.flows.train_gpt",
    "cairn.flows.watch_runs",
    "cairn.flows.watching.run_watcher",
    "graphviz",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "prefect.engine",
    "prefect.events.worker",
    "prefect.flow_engine",
    "prefect.server.api.server",
    "prefect.task_engine",
    "cairn.reports.plots.curve_plot",
    "s3fs",
    "cairn.storage.stores.s3_store",
    "torch._dynamo",
    "uvicorn",
)
_STARTERS = (
    "cairn.cli.command",
    "cairn.tasks.trainer.trainer_group",
    "tests.crash.framed_command",
    "tests.programs.chaos.rank_launcher",
)
"""The programs that start others of `PROGRAMS`."""
_USING_PREFECT = (
    "cairn.cli.command",
    "cairn.flows.orchestrator.prefect_server",
    "tests.crash.framed_command",
    "tests.crash.noticed_command",
)
"""The programs that read Prefect's settings, which takes a tenth of a second of a core."""
_POINT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
)
"""A picture of one transparent point."""
_process = ctypes.PyDLL(None, use_errno=True)
"""Keeps the interpreter's lock in its calls: a released one would stay so in the new process."""


def main() -> None:
    """Import everything, then fork at request; in a forked process, run its program."""
    for name in sys.argv[3:] or (*PROGRAMS, *_IMPORTS):
        importlib.import_module(name)
    if utilization := sys.modules.get("cairn.model.estimates.utilization"):
        utilization.__dict__["_CPU_SIZES"] = SMALL_PRODUCTS
    gc.freeze()  # a collection would copy every page
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a process with threads cannot be forked safely"
    find_thread_id()
    _ignore_signals()
    asked = socket.socket(fileno=int(sys.argv[1]))
    asked.send(b"ready")
    run(serve(asked))


def serve(server: socket.socket) -> ForkRequest:
    """Fork at request; returns in each forked process with what it is to run, and ends this one when nobody asks."""
    while received := receive_request(server):
        request, files = received
        reading, writing = os.pipe()
        try:
            child = clone_sibling()
        except OSError as refused:  # whoever asks would wait for ever
            child = -(refused.errno or 1)
        if child == 0:
            server.close()
            os.close(reading)
            # Below, the program's own files take the numbers that the request names.
            alive = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, _FIRST_MOVED)
            os.close(writing)
            become(request, files)
            os.close(alive)
            return request
        os.close(writing)
        os.read(reading, 1)  # its end: the child has become what it is to be, or it has died
        server.send(str(child).encode())
        for file in (reading, *files):
            os.close(file)
    os._exit(0)


def serve_children() -> None:
    """Fork a fork server for this process's own children, and have `subprocess` ask it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _ignore_signals()
        show_as(["fork-server"], {})
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        run(serve(theirs))
    theirs.close()
    subprocess._fork_exec = ForkExec(ours, subprocess._fork_exec)  # type: ignore[attr-defined]
    subprocess._USE_POSIX_SPAWN = False


def clone_sibling() -> int:
    """Fork a process whose parent is this one's parent; returns its id here and 0 there.

    Raises OSError where the system refuses it.
    """
    place = find_thread_id()
    ctypes.pythonapi.PyOS_BeforeFork()
    child = int(_process.syscall(_SYSCALL_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if child:
        refused = ctypes.get_errno()
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        if child == -1:
            raise OSError(refused, f"clone: {os.strerror(refused)}")
        return child
    _thread_words()[place] = os.getpid()  # fork(3) would have told the C library
    ctypes.pythonapi.PyOS_AfterFork_Child()
    return 0


@functools.cache
def find_thread_id() -> int:
    """Return where the C library keeps the id of this thread, counted in words; all forked processes know it then.

    The id alone does not tell: half of a pointer may have the same value. So a child of fork(3) looks which changed.
    """
    before, parent, (reading, writing) = list(_thread_words()), os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(changed_place(before, list(_thread_words()), parent, os.getpid())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = int(os.read(reading, 16))
    os.close(reading)
    os.close(writing)
    return found


def changed_place(before: Sequence[int], after: Sequence[int], parent: int, child: int) -> int:
    """Return the first place whose value was that of the parent and is that of the child."""
    return next(n for n, pair in enumerate(zip(before, after, strict=True)) if pair == (parent, child))


def _thread_words() -> "ctypes.Array[ctypes.c_int]":
    """Return the beginning of what the C library knows of this thread."""
    _process.pthread_self.restype = ctypes.c_void_p
    return (ctypes.c_int * (_THREAD_BYTES // 4)).from_address(_process.pthread_self())


def become(request: ForkRequest, files: list[int]) -> None:
    """Take the session, folder, environment, files and command line of the request."""
    if request.new_session:
        os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_MOVED) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, request.descriptors, strict=True):
        os.dup2(file, number)
        os.close(file)
    # The server's own streams remember what kind of file they were.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    for number in _IGNORED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if SYNCS not in request.environment:
        os.fsync = lambda descriptor: None  # type: ignore[assignment]
    show_as(request.words, request.environment)
    sys.argv = list(words_of_program(request.words))


def show_as(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show these words and variables as the process's own, over those that it was started with (proc(5))."""
    fields = [int(field) for field in Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[45:49]]
    variables = [f"{name}={value}" for name, value in environment.items()]
    regions: tuple[tuple[int, int, Sequence[str]], ...] = (
        (fields[0], fields[1], words),
        (fields[2], fields[3], variables),
    )
    for start, end, items in regions:
        shown = b"".join(os.fsencode(item) + b"\0" for item in items)[: end - start - 1]
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def run(request: ForkRequest) -> None:
    """Run the program to its end, as `python -m` would; one that starts others gets a fork server of its own first."""
    name = sys.argv[0]
    if name in _STARTERS:
        serve_children()
    stacks.listen()
    if name in _USING_PREFECT:
        _read_prefects_settings()
    if "train" in sys.argv and DRAWS not in os.environ:
        _draw_a_point()
    if name == BOUNDED:
        sys.argv.insert(0, CHILD)
        child_process.main()
    else:
        program: Callable[[], None] = importlib.import_module(name).main
        if CHILD in request.words:
            child_process.watch_parent()
        program()
    _leave()


def _read_prefects_settings() -> None:
    from prefect.context import refresh_global_settings_context
    from prefect.logging.configuration import setup_logging

    refresh_global_settings_context()
    setup_logging(incremental=False)


def _draw_a_point() -> None:
    from cairn.reports.plots import curve_plot

    curve_plot.__dict__["draw_run"] = lambda curves, **_: _POINT


def _leave() -> None:
    """Do at the end what an interpreter does, but free nothing: that copies every page, 0.4 s of a core."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _ignore_signals() -> None:
    """Survive what a terminal or a test sends to a whole process group."""
    for number in (*_IGNORED, stacks.SIGNAL):  # a forked process may be asked for its stacks before it listens
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
