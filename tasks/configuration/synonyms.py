"""The words of other tools for commands, options and keys, from synonyms.toml, and how alike two names are."""

import re
import tomllib
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

ALIKE = 0.8
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SEPARATORS = re.compile(r"[-_. ]+")


@cache
def meanings(kind: Literal["commands", "options"]) -> tuple[tuple[str, str], ...]:
    """Return each word with what it is here: a command, an option, a key or a sentence; several in the file's order."""
    return tuple((word, here) for here, words in _table()[kind].items() for word in words.split())


def find_advice(word: str) -> str:
    """Return the sentence about an option or key that Cairn does without; empty for any other."""
    return next((here for known, here in meanings("options") if " " in here and likeness(word, known) == 1), "")


@cache
def words_for(key: str) -> tuple[str, ...]:
    """Return the words of other tools for a configuration key."""
    found = (words for here, words in _table()["options"].items() if here.partition("=")[0].lstrip("-") == key)
    return tuple(" ".join(found).split())


def find_alike(word: str, names: Iterable[str]) -> str:
    """Return the name that was probably meant; empty if none is like the word."""
    best = max(names, key=lambda name: likeness(word, name), default="")
    return best if likeness(word, best) >= ALIKE else ""


def likeness(word: str, name: str) -> float:
    """Return how alike two names are, from 0 to 1, as a whole or part by part: `num_layer` and `numLayers`."""
    given, known = sorted((_parts(word), _parts(name)), key=len)
    by_part = sum(max((_part_likeness(part, other) for other in given), default=0.0) for part in known)
    return max(by_part / max(len(known), 1), SequenceMatcher(None, "".join(given), "".join(known)).ratio())


@lru_cache(maxsize=4096)
def _part_likeness(part: str, other: str) -> float:
    short, long = sorted((part, other), key=len)
    begins = len(short) >= 4 and long.startswith(short)  # `eval` for `evaluation`
    return 0.9 if begins and short != long else SequenceMatcher(None, part, other).ratio()


def _parts(name: str) -> list[str]:
    return [part for part in _SEPARATORS.split(_HUMP.sub("_", name).lower()) if part]


@cache
def _table() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
