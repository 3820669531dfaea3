"""A validation error in words: one line for each broken rule, with key, value, rule and meaning."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from tasks.configuration.key_reference import find_key, list_keys, section_meanings, suggest_key

_MOST_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """What is wrong with one key; `text` names the key and its value."""

    key: str
    text: str
    unknown: bool = False


def broken_rules(error: ValidationError, document: Mapping[str, Any], section: str = "") -> Iterator[BrokenRule]:
    """Yield the broken rules of a document that was validated as the whole configuration or as one section of it."""
    document = {section: document} if section else document
    texts: set[str] = set()
    misspelled = {_closest_section(str(item["loc"][0])) for item in error.errors() if item["type"] == "extra_forbidden"}
    for item in error.errors():
        if item["input"] is PydanticUndefined:  # a default that follows from a key that is wrong itself
            continue
        if item["type"] == "missing" and item["loc"][0] in misspelled - document.keys():  # it has a misspelled name
            continue
        location = (section, *item["loc"]) if section else item["loc"]
        path, value = _known_path(location), cast(Any, document)
        try:
            for part in path:
                value = value[part]
        except (KeyError, IndexError, TypeError):
            value = item["input"]
        for rule in _rules(item["type"] if path == location else "", item, path, value):
            if rule.text not in texts:  # a value that may be of two types breaks a rule of each
                texts.add(rule.text)
                yield rule


def unknown_key(key: str, *, is_section: bool = False) -> str:
    """Return what is wrong with a key or section that does not exist, and which was probably meant."""
    sections = section_meanings()
    if is_section and (close := _closest_section(key)):
        return f"unknown section; did you mean {close} ({sections[close].partition('. ')[0].removesuffix('.')})?"
    if likely := suggest_key(key):
        return f"unknown key; did you mean {likely.key} ({likely.summary})?"
    section = key.rpartition(".")[0]
    command = f"cairn config {section}" if section in sections else "cairn config"
    return f"unknown key; `{command}` lists the keys"


def _closest_section(name: str) -> str:
    return next(iter(get_close_matches(name, section_meanings(), n=1, cutoff=0.7)), "")


def _known_path(location: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return the part of a location that names a key; what follows are items and the validator's own names."""
    sections = section_meanings()
    ends = (end for end in range(len(location)) if (name := _dotted(location[:end])) and name not in sections)
    return tuple(location[: next(ends, None)])


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def _rules(kind: str, item: ErrorDetails, path: Sequence[str | int], value: object) -> Iterator[BrokenRule]:
    name, shown = _dotted(path), _cut(".".join(map(str, path))) or "the configuration"
    known = find_key(name)
    given = shown if isinstance(value, Mapping) else f"{shown} = {_cut(repr(value))}"
    if kind == "missing":
        required = [key for key in list_keys() if key.section == name and key.default == "required"]
        for key in [known] if known else required:
            yield BrokenRule(key=key.key, text=f"{shown if known else key.key}: missing; {key.summary}")
        return
    if kind == "extra_forbidden":
        text = f"{given}: {unknown_key(name, is_section=isinstance(value, Mapping))}"
    elif kind == "value_error":
        text = f"{given if known else shown}: {item['ctx']['error']}"
    elif known:
        text = f"{shown} = {_cut(repr(value))}: must be {known.rule}{_as_list(value, known.rule)}; {known.summary}"
    elif not name or name in section_meanings():
        text = f"{given}: must be a section; `{f'cairn config {name}'.strip()}` lists its keys"
    else:
        text = f"{given}: is filled in when the configuration is read; leave it out"
    yield BrokenRule(key=name, text=text, unknown=kind == "extra_forbidden")


def _as_list(value: object, rule: str) -> str:
    """Return how a text is written as the list that the rule asks for."""
    if not isinstance(value, str) or not rule.startswith("a list"):
        return ""
    return f", such as [{value if value[:1].isdigit() else json.dumps(value)}]"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
