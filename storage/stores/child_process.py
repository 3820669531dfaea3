"""The one way to run a child process of Cairn's: its command, its environment, and its end, also with its parent.

A child runs this module first (`python -P -m`), so that it ends even with a parent that died during its imports. A
temporary folder is removed even if the process that made it is killed.
"""

import atexit
import ctypes
import importlib
import json
import os
import pkgutil
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cairn.storage.errors import IntegrityError

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
Stream = int | IO[bytes] | None
_PARENT, _PARENT_THREAD = "CAIRN_PARENT_PID", "CAIRN_PARENT_THREAD"
ORDER_SECONDS = 3600.0
"""A child that was given nothing to do for so long exits; its parent starts a new one where it needs one."""
_POLL_SECONDS = 0.5
_SET_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
_BOUNDED, _CALLED = "--bounded", "--called"
_LEAST_MEMORY_BYTES, _MEMORY_SHARE = 1 << 30, 16
_OUT_OF_MEMORY = 3
_KEPT_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
_REMOVER = """
import os, shutil, sys, time
folders = set()
for line in sys.stdin:
    if line == ".\\n":  # its parent ends in order, though a process that was forked from it may not
        break
    {"+": folders.add, "-": folders.discard}[line[0]](os.fsdecode(bytes.fromhex(line[1:])))
for _ in range(100):  # children of the one that was killed may still write
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if not any(map(os.path.lexists, folders)):
        break
    time.sleep(0.1)
"""
_GUARD = "import os, signal; os.read(0, 1); os.killpg(0, signal.SIGKILL)"
_REMOVERS: dict[int, "subprocess.Popen[bytes]"] = {}
"""That of this process by its id: one that was forked has its own."""
_REMOVER_LOCK = threading.Lock()
_NOTICES = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
THREAD_LIMITS = (
    *("OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS", "OMP_NESTED", "OMP_THREAD_LIMIT", "OMP_TEAMS_THREAD_LIMIT"),
    *("KMP_ALL_THREADS", "KMP_DEVICE_THREAD_LIMIT", "KMP_DYNAMIC_MODE", "KMP_MAX_ACTIVE_LEVELS"),
    *("KMP_TEAMS_THREAD_LIMIT", "MKL_DYNAMIC"),
)
"""Variables with which OpenMP may give a product fewer threads than it was cut for: parts of it are then garbage."""
_SETTINGS = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def child_command(module: str, *arguments: object) -> tuple[str, ...]:
    """Return the command that runs a module as a child; it imports nothing of the working folder."""
    return (sys.executable, "-P", "-m", "cairn.storage.stores.child_process", module, *map(str, arguments))


def bounded_command(memory_bytes: int, core_seconds: int, module: str, *arguments: object) -> tuple[str, ...]:
    """Return the command that calls a module's `run(*arguments)` in a child with so much memory and time."""
    return child_command(_BOUNDED, json.dumps([memory_bytes, core_seconds, module, arguments]))


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child, in which it finds its parent and gets the threads it asks for."""
    kept = {name: value for name, value in environment.items() if name not in THREAD_LIMITS}
    return {**kept, _PARENT: str(os.getpid()), "PYTHONHASHSEED": "0"}  # sets have one order in all of them


def start_child(
    command: Sequence[str],
    *,
    stdin: Stream = PIPE,
    stdout: Stream = PIPE,
    stderr: Stream = PIPE,
    environment: Mapping[str, str] | None = None,
    own_group: bool = True,
    with_thread: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start a child, in a group of its own, which Ctrl-C in a terminal does not reach; raises OSError if it cannot.

    On Linux the kernel kills one started `with_thread`, even a stopped one, as soon as the calling thread has ended.
    """
    variables = child_environment(os.environ if environment is None else environment)
    if with_thread:
        variables[_PARENT_THREAD] = "1"
    return subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=stderr, env=variables, start_new_session=own_group
    )


def without_credentials() -> dict[str, str]:
    """Return the few variables of this process that a child needs that is given no credentials."""
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}


def hide_memory() -> None:
    """Keep memory and environment of this process, which holds credentials, from core files and its user's programs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def start_helper(program: str, *, own_group: bool = True) -> "subprocess.Popen[bytes]":
    """Start a small program that needs no package, has no credentials and says nothing."""
    command, variables = [sys.executable, "-I", "-S", "-c", program], without_credentials()
    return start_child(command, stdout=DEVNULL, stderr=DEVNULL, environment=variables, own_group=own_group)


def guard_group() -> "subprocess.Popen[bytes] | None":
    """Start a guard that kills this process's group when this process exits, even by SIGKILL.

    It waits for the end of its stdin, so keep the returned process; None if this process does not lead its group.
    """
    if os.getpgrp() != os.getpid():
        return None
    return start_helper(_GUARD, own_group=False)


def end_child(child: "subprocess.Popen[bytes]") -> int:
    """Kill a child and the group that it leads, unless it was reaped, and return its exit code."""
    if child.returncode is None:  # not reaped: no other process can have its number
        with suppress(ProcessLookupError, PermissionError):  # the latter: only zombies are left, on some systems
            os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def watch_parent() -> None:
    """End this process and the group it leads once the parent has ended: at once if it has, else polled in a thread.

    To be called before anything is imported that takes time. A process of its parent's group, such as a command,
    gets SIGTERM; any other SIGKILL.
    """
    parent_pid, with_thread = int(os.environ.pop(_PARENT, os.getppid())), bool(os.environ.pop(_PARENT_THREAD, ""))
    if with_thread and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)

    def wait_and_end() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_POLL_SECONDS)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL if with_thread else signal.SIGTERM)

    if os.getppid() != parent_pid:
        wait_and_end()
    threading.Thread(target=wait_and_end, name="parent", daemon=True).start()


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Generator[Path, None, None]:
    """Make a folder for this user alone and remove it after the block, or as soon as this process was killed.

    A small process, one for each that makes such folders, waits for its end and removes them.
    """
    folder = (parent or Path(tempfile.gettempdir())).absolute() / f"{prefix}{os.urandom(16).hex()}"
    _tell_remover("+", folder)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _tell_remover("-", folder)


def _tell_remover(sign: str, folder: Path) -> None:
    with _REMOVER_LOCK, suppress(OSError):  # no process can be started: the folder of a killed one stays
        if os.getpid() not in _REMOVERS:
            # Schedulers signal every process of a job: the remover inherits the mask.
            unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, _NOTICES)
            try:
                remover = start_helper(_REMOVER)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
            _REMOVERS[os.getpid()] = remover
            atexit.register(_end_remover, remover)
        told = _REMOVERS[os.getpid()].stdin
        assert told is not None
        told.write(f"{sign}{os.fsencode(folder).hex()}\n".encode())
        told.flush()


def _end_remover(remover: "subprocess.Popen[bytes]") -> None:
    if remover is _REMOVERS.pop(os.getpid(), None):
        remover.communicate(b".\n")


@contextmanager
def bounded_process(
    module: str, *arguments: object, file: IO[bytes], remedy: str, core_seconds: int = 24 * 3600
) -> Generator[IO[bytes], None, None]:
    """Run the module's `run(*arguments)`, a parser of files of unknown origin, in a child with bounded memory and time.

    It has no credentials, and `file`, open with a descriptor, as stdin; the block reads its stdout to the end. Raises
    IntegrityError after it, in one line, if the child exceeded a limit (then the line ends with `remedy`) or left with
    a message.
    """
    memory_bytes = _LEAST_MEMORY_BYTES + _MEMORY_SHARE * os.fstat(file.fileno()).st_size
    command = bounded_command(memory_bytes, core_seconds, module, *arguments)
    child = start_child(command, stdin=file, environment=without_credentials() | _SETTINGS)
    assert child.stdout is not None and child.stderr is not None
    try:
        with child.stdout, child.stderr:
            yield child.stdout
            said = child.stderr.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        child.wait()
    finally:
        end_child(child)
    if child.returncode == -signal.SIGXCPU:
        said = f"it takes more than {core_seconds} s of a core. {remedy}"
    elif child.returncode == _OUT_OF_MEMORY or child.returncode < 0:
        found = f"it takes more than {memory_bytes >> 20:,} MiB of memory (its reader ended with {child.returncode})"
        rule = f"rule: at most {_LEAST_MEMORY_BYTES >> 20:,} MiB and {_MEMORY_SHARE} times its size"
        said = f"{found}; {rule}. {remedy}"
    if child.returncode != 0:
        raise IntegrityError(said)


def call_child(function: str, *arguments: object, given: bytes = b"", limit_seconds: float = 60.0) -> bytes:
    """Return as JSON what a function, named by module and name, returns in a child of this group.

    It reads what is given from stdin, and what it prints goes to stderr. Raises OSError or SubprocessError.
    """
    command, variables = child_command(_CALLED, json.dumps([function, arguments])), child_environment(os.environ)
    done = subprocess.run(command, env=variables, input=given, capture_output=True, check=True, timeout=limit_seconds)
    return done.stdout


def _call(function: str, arguments: Sequence[object]) -> None:
    from cairn.storage.stores import codec  # which a bounded child need not have

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with out:
        out.write(codec.encode(pkgutil.resolve_name(function)(*arguments)))
    os._exit(0)


def main() -> None:
    """Run the module that the first argument names, for as long as the parent runs."""
    hide_memory()
    watch_parent()
    del sys.argv[0]
    if sys.argv[0] == _CALLED:
        _call(*json.loads(sys.argv[1]))
    if sys.argv[0] != _BOUNDED:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    memory_bytes, core_seconds, module, arguments = json.loads(sys.argv[1])
    for kind, most in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CPU, core_seconds)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        importlib.import_module(module).run(*arguments)
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
