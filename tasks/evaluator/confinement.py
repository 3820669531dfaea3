"""Runs a command that cannot reach into other processes of its user: `python confinement.py DESCRIPTOR COMMAND…`.

The boundary's name is written to the descriptor. Imports nothing of Cairn: an isolated interpreter runs this file.
Sources: landlock(7); user_namespaces(7); ptrace(2), "Ptrace access mode checking", which also guards /proc/PID/environ;
seccomp(2); core(5): a signal makes a process write its memory into a file, as far as its limit allows.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _REFER = 1, 1, 1 << 13
_NO_NEW_PRIVILEGES, _NEW_USER_NAMESPACE, _SET_SECCOMP, _FILTER = 38, 0x10000000, 22, 2
_SET_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of a filter: of two jumps the first is taken where the comparison holds."""
_ALLOW, _REFUSE, _X32, _SET_SIGNAL = 0x7FFF0000, 0x50001, 0x40000000, 10  # it is refused with EPERM
_SYSTEMS = {
    "x86_64": (0xC000003E, 302, 72, {62: 1, 200: 1, 234: 2, 129: 1, 297: 2, 424: 1}),
    "aarch64": (0xC00000B7, 261, 25, {129: 1, 130: 1, 131: 2, 138: 1, 240: 2, 424: 1}),
}
"""Of a machine: its number, prlimit64, fcntl, and the calls that send a signal, with the place of its number."""
_CORE = [signal.SIGQUIT, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV]
_CORE += [signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS]


def by_landlock() -> bool:
    """Enter a Landlock domain, which inspects no process outside; it may move files (from Linux 5.19 on), not mount."""
    if _system_call(_CREATE_RULESET, None, 0, _VERSION) < 2:
        return False
    ruleset = _system_call(_CREATE_RULESET, struct.pack("=Q", _REFER), 8, 0)
    root = os.open("/", os.O_PATH)
    try:
        has_rule = _system_call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", _REFER, root), 0) == 0
        gains_nothing = has_rule and ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
        return gains_nothing and _system_call(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(root)


def by_user_namespace() -> bool:
    """Enter a user namespace with the same user and group, if the system lets this user make one."""
    user, group = os.geteuid(), os.getegid()
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    if ctypes.CDLL(None).unshare(_NEW_USER_NAMESPACE) != 0:
        return False
    with suppress(OSError):  # without a map the boundary is the same, and the user is shown as nobody
        for name, content in maps.items():
            Path(f"/proc/self/{name}").write_text(content)
    return True


def refuse_signals() -> bool:
    """Refuse, for good, signals that make a process write its memory into a file, and limits of other processes."""
    kind, limits, control, signals = _SYSTEMS.get(os.uname().machine, (0, 0, 0, dict[int, int]()))
    refuse, allow = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, kind), refuse]  # a program for another kind of machine
    steps += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), refuse]
    steps += [(_EQUAL, 0, 4, limits), (_LOAD, 0, 0, 16), (_EQUAL, 1, 0, 0), refuse, allow]
    for call, place in {control: 1, **signals}.items():
        refused = [_SET_SIGNAL] if call == control else _CORE
        steps += [(_EQUAL, 0, 2 * len(refused) + 2, call), (_LOAD, 0, 0, 16 + 8 * place)]
        for value in refused:
            steps += [(_EQUAL, 0, 1, value), refuse]
        steps.append(allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in [*steps, allow]))
    program, change = struct.pack("@HP", len(steps) + 1, ctypes.addressof(code)), ctypes.CDLL(None).prctl
    return kind != 0 and change(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == change(_SET_SECCOMP, _FILTER, program, 0, 0) == 0


def enter_boundary() -> str:
    """Enter the first boundary of this system that holds; return its name, or `none`."""
    # Landlock does not hold for a user with CAP_SYS_ADMIN or CAP_PERFMON on Linux 6.14 and later.
    ways = {"landlock": by_landlock, "user namespace": by_user_namespace}
    with process_outside() as outside:
        environment, limits = f"/proc/{outside}/environ", resource.getrlimit(resource.RLIMIT_CORE)
        read = Path(environment).read_bytes
        name = next((name for name, enter in ways.items() if enter() and is_refused(read)), "none")
        is_whole = refuse_signals() and is_refused(lambda: resource.prlimit(outside, resource.RLIMIT_CORE, limits))
    return name if is_whole or name == "none" else f"{name}, partial"


@contextmanager
def process_outside() -> Iterator[int]:
    """Start a process that enters no boundary and hides nothing; yield its number."""
    if not (outside := os.fork()):
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        signal.pause()
    try:
        yield outside
    finally:
        os.kill(outside, signal.SIGKILL)
        os.waitpid(outside, 0)


def is_refused(access: Callable[[], object]) -> bool:
    """Whether the system refuses an access to another process."""
    try:
        access()
    except PermissionError:
        return True
    return False


def main() -> None:
    """Enter a boundary, report it and become the command."""
    descriptor, *command = sys.argv[1:]
    boundary = enter_boundary() if sys.platform == "linux" else "none"
    os.write(int(descriptor), boundary.encode())
    os.close(int(descriptor))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: cannot be started: {error}")


def _system_call(number: int, *arguments: int | bytes | None) -> int:
    longs = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *longs))


if __name__ == "__main__":
    main()
