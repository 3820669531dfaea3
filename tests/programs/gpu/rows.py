"""What a step of the GPU check says while it works: a line of JSON a row, so that a killed step leaves its rows."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

Figure = str | float | int | bool | None
STEP_SECONDS = "GPU_CHECK_STEP_SECONDS"
"""The variable that tells a step its time limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that was seen: its name, whether it is as it must be (None: only measured), and its figures."""

    name: str
    passed: bool | None = None
    figures: Mapping[str, Figure] = field(default_factory=dict)


def say(name: str, /, *, passed: bool | None = None, **figures: Figure) -> None:
    """Print a row for the parent, now."""
    print(json.dumps(asdict(Row(name=name, passed=passed, figures=figures))), flush=True)


def time_limit() -> float:
    """Return the seconds that this step may take, endless by itself."""
    return float(os.environ.get(STEP_SECONDS, "inf"))


def heard(line: str) -> Row | None:
    """Return the row that a line of a step's output is, or ends with; None for any other line."""
    begin = line.find('{"name": ')
    if begin < 0:
        return None
    try:
        return Row(**json.loads(line[begin:]))
    except (ValueError, TypeError):  # cut short by the end of the process
        return None
