"""Runs a parser of files of unknown origin in a child process: bounded memory and time, no credentials."""

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO

from cairn.storage.errors import IntegrityError
from cairn.storage.stores import child_process

_LEAST_MEMORY_BYTES, _MEMORY_SHARE = 1 << 30, 16
_OUT_OF_MEMORY = 3
_KEPT_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
_SETTINGS = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def bounded_process(
    module: str, *arguments: object, file: IO[bytes], remedy: str, core_seconds: int = 24 * 3600
) -> Generator[IO[bytes], None, None]:
    """Run the module's `run(*arguments)` in a child with `file`, open with a descriptor, as stdin; yield its stdout.

    The block reads stdout to its end. Raises IntegrityError after it, in one line, if the child exceeded a limit (then
    the line ends with `remedy`) or left with a message.
    """
    memory_bytes = _LEAST_MEMORY_BYTES + _MEMORY_SHARE * os.fstat(file.fileno()).st_size
    order = json.dumps([memory_bytes, core_seconds, module, arguments])
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    command = child_process.child_command("cairn.storage.snapshots.bounded_process", order)
    child = child_process.start_child(command, stdin=file, environment=kept | _SETTINGS)
    assert child.stdout is not None and child.stderr is not None
    try:
        with child.stdout, child.stderr:
            yield child.stdout
            said = child.stderr.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        child.wait()
    finally:
        child_process.end_child(child)
    if child.returncode == -signal.SIGXCPU:
        said = f"it takes more than {core_seconds} s of a core. {remedy}"
    elif child.returncode == _OUT_OF_MEMORY or child.returncode < 0:
        found = f"it takes more than {memory_bytes >> 20:,} MiB of memory (its reader ended with {child.returncode})"
        rule = f"rule: at most {_LEAST_MEMORY_BYTES >> 20:,} MiB and {_MEMORY_SHARE} times its size"
        said = f"{found}; {rule}. {remedy}"
    if child.returncode != 0:
        raise IntegrityError(said)


def main() -> None:
    """Run the module that the order names, within the limits that it names."""
    *limits, module, arguments = json.loads(sys.argv[1])
    for kind, most in zip((resource.RLIMIT_DATA, resource.RLIMIT_CPU), limits, strict=True):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        importlib.import_module(module).run(*arguments)
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
