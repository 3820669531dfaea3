"""The values of a configuration under dotted names. Imports no pydantic: the verbs that only read use it."""

from collections.abc import Mapping
from typing import Any


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections under their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
