"""The command `cairn` and, from Python, `cairn.open` and `cairn.train`."""

from cairn.api import Comparison, Picture, Run, Store, TrainingStopped, open, train

__all__ = ["Comparison", "Picture", "Run", "Store", "TrainingStopped", "open", "train"]
