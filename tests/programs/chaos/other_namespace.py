"""`cairn` in a pid namespace of its own, as in another container (run as a module, with VERB …).

This process and the namespace's first one only wait; the command ends as it would here, and what it leaves behind ends.
Source: pid_namespaces(7).
"""

import ctypes
import os
import signal
import subprocess
import sys

_NEW_MOUNTS, _NEW_PIDS = 0x00020000, 0x20000000
_DEATH_SIGNAL = 1
_SIGNALLED = 128


def main() -> None:
    """Run the command and leave as it leaves."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_NEW_MOUNTS | _NEW_PIDS) != 0:
        raise SystemExit(f"no namespace can be made: {os.strerror(ctypes.get_errno())}")
    first = os.fork()
    if first == 0:
        library.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os._exit(_be_the_first())
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    if code > _SIGNALLED:
        if code - _SIGNALLED != signal.SIGKILL:
            signal.signal(code - _SIGNALLED, signal.SIG_DFL)
        os.kill(os.getpid(), code - _SIGNALLED)
    os._exit(code)


def _be_the_first() -> int:
    """Show the namespace's own processes in /proc, start the command, bury all and return how the command ended."""
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    command = os.fork()
    if command == 0:
        os.execv(sys.executable, [sys.executable, "-m", "cairn.cli.command", *sys.argv[1:]])
    while True:
        pid, status = os.wait()
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else _SIGNALLED - code


if __name__ == "__main__":
    main()
