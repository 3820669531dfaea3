"""Which code is at work: the installed version, and the commit where it is a checkout.

Owns one string for receipts. Refuses to guess: without git the commit is `unknown`.
"""

import subprocess
from importlib.metadata import version
from pathlib import Path


def code_version() -> str:
    """Return `version+commit`."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return f"{version('cairn')}+{commit}"
