"""Runs a command that cannot inspect other processes of its user: `python confinement.py DESCRIPTOR COMMAND…`.

The boundary's name is written to the descriptor. Imports nothing of Cairn: an isolated interpreter runs this file.
Sources: landlock(7); user_namespaces(7); ptrace(2), "Ptrace access mode checking", which also guards /proc/PID/environ.
"""

import ctypes
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _REFER = 1, 1, 1 << 13
_NO_NEW_PRIVILEGES, _NEW_USER_NAMESPACE = 38, 0x10000000


def by_landlock() -> bool:
    """Enter a Landlock domain, which inspects no process outside; it may move files (from Linux 5.19 on), not mount."""
    if _system_call(_CREATE_RULESET, None, 0, _VERSION) < 2:
        return False
    ruleset = _system_call(_CREATE_RULESET, struct.pack("=Q", _REFER), 8, 0)
    root = os.open("/", os.O_PATH)
    try:
        return (
            _system_call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", _REFER, root), 0) == 0
            and ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
            and _system_call(_RESTRICT_SELF, ruleset, 0) == 0
        )
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


def is_confined() -> bool:
    """Whether the environment of the process that started this one cannot be read."""
    try:
        os.close(os.open(f"/proc/{os.getppid()}/environ", os.O_RDONLY))
    except PermissionError:
        return True
    return False


def main() -> None:
    """Enter the first boundary of this system that holds, report it and become the command."""
    descriptor, *command = sys.argv[1:]
    # Landlock does not hold for a user with CAP_SYS_ADMIN or CAP_PERFMON on Linux 6.14 and later.
    ways = {"landlock": by_landlock, "user namespace": by_user_namespace} if sys.platform == "linux" else {}
    boundary = next((name for name, enter in ways.items() if enter() and is_confined()), "none")
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
