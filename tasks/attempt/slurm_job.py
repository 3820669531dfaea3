"""Asks Slurm whether a person cancelled this job: SIGTERM is also sent before a preemption, a requeue and a time limit.

Source: `scontrol show job` of Slurm 22.05, observed after each of the four.
"""

import math
import re
import subprocess
from collections.abc import Mapping

_TIMEOUT_SECONDS = 5.0
_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")


def is_cancelled_in_slurm(environment: Mapping[str, str]) -> bool:
    """Whether this process belongs to a job that was ended by `scancel`; False if Slurm does not answer."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return False
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return is_cancelled(shown)


def is_cancelled(shown: str) -> bool:
    """Whether `scontrol show job` describes a job that `scancel` ended.

    While it ends, it is only COMPLETING; but it was not preempted, has run (a job that is queued again has not, by its
    new start) and is not out of time.
    """
    words = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    state = words.get("JobState", "")
    if state.startswith("CANCELLED"):
        return True
    if state != "COMPLETING" or words.get("PreemptTime", "None") != "None":
        return False
    return 0 < _seconds(words.get("RunTime", "")) < (_seconds(words.get("TimeLimit", "")) or math.inf)


def _seconds(duration: str) -> int:
    """Return the seconds of [days-]hours:minutes:seconds, 0 for anything else, such as UNLIMITED."""
    found = _DURATION.fullmatch(duration)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
