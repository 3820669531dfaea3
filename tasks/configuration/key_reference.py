"""A description of every configuration key, from the fields of `RunConfig`, and the rules that a document breaks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from cairn.model.configuration.training import UNFROZEN_TRAINING
from cairn.tasks.configuration.run_configuration import FROZEN_SECTIONS, RunConfig
from cairn.tasks.configuration.synonyms import ALIKE, find_advice, find_alike, likeness, words_for

_MOST_CHARACTERS = 80
_UNITS = {"gpu_seconds": "device seconds", **{name: name for name in ("seconds", "bytes", "steps", "tokens", "nats")}}
"""Ends of key names, with the unit that each means."""
_NUMBERS = {"boolean": "true or false", "integer": "a whole number", "number": "a number"}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "of at least", "exclusiveMaximum": "below", "maximum": "at most"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigurationKey:
    """A key such as `training.lr`. `rule` and `default` are for people; `unit` is empty where the value has none."""

    key: str
    meaning: str
    unit: str
    rule: str
    default: str
    frozen: bool

    @property
    def section(self) -> str:
        """Its section, empty for a key outside of all sections."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The key without its section."""
        return self.key.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The meaning without its details, for a message."""
        return self.meaning.partition(";")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """A rule that one key breaks; `text` names the key and its value."""

    key: str
    text: str
    unknown: bool = False


@cache
def keys_by_name() -> Mapping[str, ConfigurationKey]:
    """Return all keys in the order of the models, by names such as `training.lr`."""
    keys = {}
    for key, field, _, default in _fields(_schema(), "", {}):
        if _reference(field) or field.get("internal"):
            continue
        section, _, name = key.partition(".")
        unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(f"_{suffix}")), "")
        keys[key] = ConfigurationKey(
            key=key,
            meaning=" ".join(field["description"].split()),
            unit=field.get("unit", unit),
            rule=_rule(field),
            default=default,
            frozen=section in FROZEN_SECTIONS and not (section == "training" and name in UNFROZEN_TRAINING),
        )
    return keys


@cache
def section_meanings() -> Mapping[str, str]:
    """Return the sentence of every section by its name, in the order of the models."""
    return {name: section["description"] for name, _, section, _ in _fields(_schema(), "", {}) if section}


def suggest_key(unknown: str) -> ConfigurationKey | None:
    """Return the key that was probably meant, by spelling, meaning or synonym; one of the same section first."""
    section, _, name = unknown.rpartition(".")
    words = name.replace("_", " ").lower()

    def rank(key: ConfigurationKey) -> float:
        spelled = max(likeness(name, one) for one in (key.name, *words_for(key.key)))
        found = key.meaning.lower().find(words) if len(words) >= 4 else -1  # a shorter word is in too many meanings
        meant = 0.85 if found == 0 else 0.65 if found > 0 else 0.0
        begins = 0.95 if key.name.startswith(f"{name}_") else 0.0
        place = 0.15 if section and key.section == section else 0.0 if section or key.key.count(".") < 2 else -0.2
        return max(spelled, meant, begins) + place

    found = max(keys_by_name().values(), key=rank)
    return found if rank(found) >= ALIKE else None


@cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _fields(
    model: Mapping[str, Any], prefix: str, defaults: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any] | None, str]]:
    """Yield key, field, section and default of each field; section is the schema of a section or of a list's items."""
    for name, field in model["properties"].items():
        value = defaults.get(name, field.get("default"))
        default = "not set" if value is None else json.dumps(value, ensure_ascii=False)
        if value is None and name in model.get("required", ()):
            default = "required"
        reference = _reference(field) or field.get("items", {}).get("$ref")
        section = _schema()["$defs"][reference.rpartition("/")[2]] if reference else None
        yield f"{prefix}{name}", field, section, field.get("default_rule", default)
        if section:
            yield from _fields(section, f"{prefix}{name}.", value if "$ref" in field and value else {})


def _reference(field: Mapping[str, Any]) -> str | None:
    """Return the name of the section that a field is, or may be."""
    choices = (field, *field.get("anyOf", ()))
    return next((one["$ref"] for one in choices if "$ref" in one), None)


def _rule(field: Mapping[str, Any]) -> str:
    """Return the rule for a value: `a number above 0`."""
    if "rule" in field:
        return str(field["rule"])
    if "anyOf" in field:
        return " or ".join(_rule(one) for one in field["anyOf"] if one.get("type") != "null")
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return f"one of {', '.join(value or json.dumps(value) for value in field['enum'])}"
    if field["type"] == "array":
        return "a list of tables" if "$ref" in field["items"] else f"a list, each item {_rule(field['items'])}"
    if field["type"] not in _NUMBERS:
        return "a text that is not empty" if field.get("minLength") else "a text"
    limits = ((word, field[name]) for name, word in _BOUNDS.items() if name in field)
    bounds = (f"{word} {n:g}" if n < 2**53 else f"{word} 2^{int(n).bit_length() - 1}" for word, n in limits)
    return f"{_NUMBERS[field['type']]} {' and '.join(bounds)}".rstrip()


def broken_rules(error: ValidationError, document: Mapping[str, Any], section: str = "") -> Iterator[BrokenRule]:
    """Yield the broken rules of a document that was validated as the whole configuration or as one section of it."""
    document = {section: document} if section else document
    texts: set[str] = set()
    unknown = (str(item["loc"][0]) for item in error.errors() if item["type"] == "extra_forbidden")
    misspelled = {find_alike(name, section_meanings()) for name in unknown}
    for item in error.errors():
        if item["input"] is PydanticUndefined:  # a default that follows from a key that is wrong itself
            continue
        if item["type"] == "missing" and item["loc"][0] in misspelled - document.keys():  # it has a misspelled name
            continue
        location = (section, *item["loc"]) if section else item["loc"]
        # The name of a key is followed by items and the validator's own names.
        starts = ((end, _dotted(location[:end])) for end in range(1, len(location)))
        path = location[: next((end for end, name in starts if name and name not in section_meanings()), None)]
        value = cast(Any, document)
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
    """Return the message about a key or section that does not exist, with the one that was probably meant."""
    sections = section_meanings()
    if is_section and (close := find_alike(key, sections)):
        return f"unknown section; did you mean {close} ({sections[close].partition('. ')[0].removesuffix('.')})?"
    section, _, name = key.rpartition(".")
    if advice := find_advice(name):
        return f"unknown key; {advice}"
    if likely := suggest_key(key):
        return f"unknown key; did you mean {likely.key} ({likely.summary})?"
    command = f"cairn config {section}" if section in sections else "cairn config"
    return f"unknown key; `{command}` lists the keys"


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def _rules(kind: str, item: ErrorDetails, path: Sequence[str | int], value: object) -> Iterator[BrokenRule]:
    name, shown = _dotted(path), _cut(".".join(map(str, path))) or "the configuration"
    known = keys_by_name().get(name)
    is_secret = any(key == name and field.get("writeOnly") for key, field, *_ in _fields(_schema(), "", {}))
    given = shown if isinstance(value, Mapping) or is_secret else f"{shown} = {_cut(repr(value))}"
    if kind == "missing":
        required = [key for key in keys_by_name().values() if key.section == name and key.default == "required"]
        for key in [known] if known else required:
            yield BrokenRule(key=key.key, text=f"{shown if known else key.key}: missing; {key.summary}")
        return
    if kind == "extra_forbidden":
        if isinstance(value, Mapping) and value and not find_alike(name, section_meanings()):
            for inner in value:  # a section of another tool, whose keys may have words for ours
                yield from _rules(kind, item, [*path, inner], value[inner])
            return
        text = f"{given}: {unknown_key(name, is_section=isinstance(value, Mapping))}"
    elif kind == "value_error":
        text = f"{given if known else shown}: {item['ctx']['error']}"
    elif known:
        as_list = ""
        if isinstance(value, str) and known.rule.startswith("a list"):
            as_list = f", such as [{value if value[:1].isdigit() else json.dumps(value)}]"
        text = f"{given}: must be {known.rule}{as_list}; {known.summary}"
    elif not name or name in section_meanings():
        text = f"{given}: must be a section; `{f'cairn config {name}'.strip()}` lists its keys"
    else:
        text = f"{given}: is filled in when the configuration is read; leave it out"
    yield BrokenRule(key=name, text=text, unknown=kind == "extra_forbidden")


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
