"""The check that a machine passes before it joins an attempt: a command of its own configuration, never of a log."""

import shlex
import socket
import subprocess

from tasks.configuration.settings import MachinesConfig
from tasks.text.format import one_line

_SHOWN_CHARACTERS = 160


def check_machine(rules: MachinesConfig) -> str:
    """Run `machines.check`, for as long as machines are waited for; return why this one does not join, or ""."""
    if not rules.check:
        return ""
    try:
        done = subprocess.run(
            shlex.split(rules.check),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=rules.wait_seconds,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"machines.check of {socket.gethostname()} failed: {error}"
    said = one_line(f"{done.stdout}{done.stderr}".strip()[-_SHOWN_CHARACTERS:], _SHOWN_CHARACTERS)
    return f"machines.check of {socket.gethostname()} left with {done.returncode}: {said}" if done.returncode else ""
