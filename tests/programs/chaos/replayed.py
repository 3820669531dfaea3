"""`cairn replay` of a run that was disturbed: every segment it committed must be computed again to the same digest."""

import json
from collections import Counter
from dataclasses import dataclass, field

from tests.processes.waiting import patience_seconds
from tests.programs.chaos.environment import Environment
from tests.programs.chaos.observer import RUN

EQUAL = "equal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """How many committed segments came to which outcome, and what does not hold."""

    outcomes: dict[str, int] = field(default_factory=dict)
    violations: tuple[str, ...] = ()


def replay_segments(environment: Environment) -> Replayed:
    """Replay all segments of a finished run whose judge has been."""
    process = environment.command.start_verb("replay", RUN, "--json")
    code = process.wait(timeout=2 * patience_seconds())
    words = environment.command.output()
    try:
        segments = json.loads(words)["segments"]
    except ValueError:
        return Replayed(violations=(f"replay: exit {code}: {words[-600:]}",))
    others = [
        f"replay: steps {item['from_step']} to {item['end']['step']} are {item['outcome']}: {item['why']}"
        for item in segments
        if item["outcome"] != EQUAL
    ]
    if not others and code != 0:
        others = [f"replay: exit {code} though every segment is equal"]
    return Replayed(outcomes=dict(Counter(item["outcome"] for item in segments)), violations=tuple(others))
