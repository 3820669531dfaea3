"""Every configuration key in words, from the fields of `RunConfig`: for `cairn config`, its page and messages."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import BaseModel

from model.configuration.training import UNFROZEN_TRAINING
from tasks.configuration.run_configuration import FROZEN_SECTIONS, RunConfig

_UNIT_SUFFIXES = {"gpu_seconds": "device seconds"} | {
    name: name for name in ("seconds", "bytes", "steps", "tokens", "nats")
}
"""Ends of key names, with the unit that each means."""

_BOUNDS = {"exclusiveMinimum": "above", "minimum": "of at least", "exclusiveMaximum": "below", "maximum": "at most"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigurationKey:
    """A key such as `training.lr`. `rule` and `default` are words; `unit` is empty where the value has none."""

    key: str
    meaning: str
    unit: str
    rule: str
    default: str
    frozen: bool

    @property
    def section(self) -> str:
        """The section it stands in, empty for a key outside of all sections."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The key without its section."""
        return self.key.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The meaning without its details, for a message."""
        return self.meaning.partition(";")[0]


@cache
def list_keys() -> tuple[ConfigurationKey, ...]:
    """Return all keys in the order of the models."""
    fields = ((key, field, default) for key, field, _, default in _fields(_schema(), "", {}) if "$ref" not in field)
    return tuple(_key(key, field, default) for key, field, default in fields if not field.get("internal"))


@cache
def section_meanings() -> Mapping[str, str]:
    """Return the sentence of every section by its name, in the order of the models."""
    return {name: section["description"] for name, _, section, _ in _fields(_schema(), "", {}) if section}


def find_key(name: str) -> ConfigurationKey | None:
    """Return the key of this name; None where there is none."""
    return next((key for key in list_keys() if key.key == name), None)


def meaning_of(key: str) -> str:
    """Return the meaning of a key such as `training.lr` from its field alone; raises KeyError for an unknown key."""
    model: type[BaseModel] = RunConfig
    for part in key.split("."):
        field = model.model_fields[part]
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return (field.description or "").partition(";")[0]


def suggest_key(unknown: str) -> ConfigurationKey | None:
    """Return the key that was probably meant: one of the same section before others, by spelling before meaning."""
    section, _, name = unknown.rpartition(".")
    keys = {key.key: key for key in list_keys()}
    beside = {key.name: key for key in keys.values() if key.section == section}
    elsewhere = {key.name: key for key in reversed(keys.values())}
    found = _spelled(name, beside) or _meant(name, beside, at_start=True) or elsewhere.get(name)
    found = found or _meant(name, beside) or _spelled(name, elsewhere) or _meant(name, elsewhere)
    if found is None and (close := get_close_matches(unknown, keys, n=1, cutoff=0.7)):
        found = keys[close[0]]
    return found


def _spelled(name: str, keys: Mapping[str, ConfigurationKey]) -> ConfigurationKey | None:
    begun = [key for key in keys if key == name or key.startswith(f"{name}_")]
    close = begun or get_close_matches(name, keys, n=1, cutoff=0.65)
    return keys[close[0]] if close else None


def _meant(name: str, keys: Mapping[str, ConfigurationKey], *, at_start: bool = False) -> ConfigurationKey | None:
    words = name.replace("_", " ").lower()
    if len(words) < 4:  # it occurs in too many meanings
        return None
    places = ((key.meaning.lower().find(words), key) for key in keys.values())
    return next((key for place, key in places if place == 0 or (place > 0 and not at_start)), None)


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
        reference = field.get("$ref") or field.get("items", {}).get("$ref")
        section = _schema()["$defs"][reference.rpartition("/")[2]] if reference else None
        yield f"{prefix}{name}", field, section, field.get("default_rule", default)
        if section:
            yield from _fields(section, f"{prefix}{name}.", value if "$ref" in field and value else {})


def _key(key: str, field: Mapping[str, Any], default: str) -> ConfigurationKey:
    section, _, name = key.partition(".")
    unit = next((unit for suffix, unit in _UNIT_SUFFIXES.items() if name.endswith(f"_{suffix}")), "")
    return ConfigurationKey(
        key=key,
        meaning=field["description"],
        unit=field.get("unit", unit),
        rule=_rule(field),
        default=default,
        frozen=section in FROZEN_SECTIONS and not (section == "training" and name in UNFROZEN_TRAINING),
    )


def _rule(field: Mapping[str, Any]) -> str:
    """Return what a value must be: `a number above 0`."""
    if "rule" in field:
        return str(field["rule"])
    if "anyOf" in field:
        return " or ".join(_rule(one) for one in field["anyOf"] if one.get("type") != "null")
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return f"one of {', '.join(value or json.dumps(value) for value in field['enum'])}"
    match field["type"]:
        case "boolean":
            return "true or false"
        case "integer":
            return f"a whole number{_bounds(field)}"
        case "number":
            return f"a number{_bounds(field)}"
        case "array" if "$ref" in field["items"]:
            return "a list of tables"
        case "array":
            return f"a list, each item {_rule(field['items'])}"
        case _:
            return "a text that is not empty" if field.get("minLength") else "a text"


def _bounds(field: Mapping[str, Any]) -> str:
    limits = [(word, field[name]) for name, word in _BOUNDS.items() if name in field]
    numbers = [f"{limit:g}" if limit < 2**53 else f"2^{int(limit).bit_length() - 1}" for _, limit in limits]
    words = [f"{word} {number}" for (word, _), number in zip(limits, numbers, strict=True)]
    return f" {' and '.join(words)}" if words else ""
