"""How far the making of a snapshot has come: the words between the builder and whoever shows it.

Owns the record. Refuses to know terminals and clocks: who shows it measures the time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class BuildStage(StrEnum):
    """What is being done with the text, in this order."""

    CHECKING = "checking"
    SURVEYING = "surveying"
    TOKENIZING = "tokenizing"
    WRITING = "writing"


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildProgress:
    """Bytes done of all there are in this stage, and documents so far; bytes are text's, in the first stage files'."""

    stage: BuildStage
    bytes_done: int
    bytes_total: int
    documents: int


ProgressListener: TypeAlias = Callable[[BuildProgress], None]


def unheard(progress: BuildProgress) -> None:
    """Tell nobody."""
