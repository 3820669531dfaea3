"""The values of a stored configuration. Imports no pydantic: the verbs that only read use it."""

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections under their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def stored_value(document: Mapping[str, Any], section: str, key: str, kind: type[T]) -> T | None:
    """Return a value of this kind, None where another version's configuration has none; an int is a float too."""
    found = document.get(section)
    value = found.get(key) if isinstance(found, Mapping) else None
    value = float(value) if kind is float and isinstance(value, int) else value
    return value if isinstance(value, kind) else None
