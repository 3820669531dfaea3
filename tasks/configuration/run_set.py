"""A set of runs: `--set` with several values for a key, and one run for each combination of them.

Several values are separated by commas, each written as in TOML (text in quotes). A list in brackets is one value, and
so is everything that cannot be read in this way.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tasks.errors import InvalidConfiguration

MOST_RUNS = 200
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_.+-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetMember:
    """One run of a set and the overrides that make it what it is."""

    run_id: str
    overrides: tuple[str, ...]


def expand_set(name: str, overrides: Sequence[str]) -> tuple[SetMember, ...]:
    """Return the runs `NAME.key=value` that the overrides ask for; one run of this name where each key has one value.

    Raises `InvalidConfiguration` for two runs of one name, or more than `MOST_RUNS`.
    """
    choices = [_choices(override) for override in overrides]
    keys = [override.partition("=")[0].strip() for override in overrides]
    ends = [key.rpartition(".")[2] for key in keys]
    short = [key if ends.count(end) > 1 else end for key, end in zip(keys, ends, strict=True)]
    varied = [place for place, values in enumerate(choices) if len(values) > 1]
    if not varied:
        return (SetMember(run_id=name, overrides=tuple(overrides)),)
    members = []
    for chosen in product(*choices):
        parts = [f"{short[place]}={_UNNAMEABLE.sub('_', chosen[place]).strip('_')}" for place in varied]
        settings = tuple(f"{key}={value}" for key, value in zip(keys, chosen, strict=True))
        members.append(SetMember(run_id=".".join([name, *parts]), overrides=settings))
        if len(members) > MOST_RUNS:
            raise InvalidConfiguration(f"--set: asks for more than {MOST_RUNS} runs; name fewer values")
    names = [member.run_id for member in members]
    if repeated := next((one for one in names if names.count(one) > 1), None):
        raise InvalidConfiguration(f"--set: two runs would be named {repeated}; name each value once, and each key")
    return tuple(members)


def _choices(override: str) -> list[str]:
    """Return the values of one `section.key=value` as texts."""
    text = override.partition("=")[2]
    try:
        values = tomllib.loads(f"values = [{text}]")["values"]
        return [json.dumps(value) for value in values] if len(values) > 1 else [text]
    except (tomllib.TOMLDecodeError, TypeError):  # no list of values, or one of dates
        return [text]
