"""The command `cairn` and, from Python, `cairn.open` and `cairn.train`, which are imported when they are used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cairn.api import Comparison, Picture, Run, Store, TrainingStopped, open, train

__all__ = ["Comparison", "Picture", "Run", "Store", "TrainingStopped", "open", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cairn' has no attribute {name!r}")
    return getattr(import_module("cairn.api"), name)
