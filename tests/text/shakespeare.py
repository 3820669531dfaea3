"""The text that tests train on: in the repository, so that no test depends on a machine or on Python's version."""

from pathlib import Path

TINY_SHAKESPEARE = Path(__file__).with_name("tinyshakespeare.txt")
