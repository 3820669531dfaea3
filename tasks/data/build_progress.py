"""Progress of building a snapshot."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as compute


class BuildStage(StrEnum):
    """The stages of a build, in this order."""

    CHECKING = "checking"
    SURVEYING = "surveying"
    TOKENIZING = "tokenizing"
    WRITING = "writing"


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildProgress:
    """Bytes done and in all in this stage, and documents so far; bytes of files in the first stage, then of text."""

    stage: BuildStage
    bytes_done: int
    bytes_total: int
    documents: int


ProgressListener: TypeAlias = Callable[[BuildProgress], None]


def ignore_progress(progress: BuildProgress) -> None:
    """Do nothing."""


class StageCounter:
    """Counts bytes and documents of one stage and reports them."""

    def __init__(
        self, listener: ProgressListener, stage: BuildStage, bytes_total: int, done: int = 0, documents: int = 0
    ) -> None:
        self._listener, self._stage, self._total = listener, stage, bytes_total
        self._done, self._documents = done, documents

    def set_files(self, bytes_done: int, bytes_total: int) -> None:
        """Report the bytes of files so far."""
        self._total = bytes_total
        self.set_text(bytes_done, 0)

    def set_text(self, bytes_done: int, documents: int) -> None:
        """Report the bytes and documents so far."""
        self._done, self._documents = bytes_done, documents
        done = min(bytes_done, self._total)
        self._listener(BuildProgress(stage=self._stage, bytes_done=done, bytes_total=self._total, documents=documents))

    def count(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches of parts, and report each after its use."""
        for batch in batches:
            yield batch
            more = compute.sum(batch.column("bytes")).as_py()
            self.set_text(self._done + more, self._documents + batch.column("kind").null_count)
