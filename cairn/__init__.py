"""The command `cairn` and, from Python, `cairn.open` and `cairn.train`."""

from cairn.api import Run, Store, TrainingStopped, open, train

__all__ = ["Run", "Store", "TrainingStopped", "open", "train"]
