"""An attempt's step records as they grow: what is new since the last look, and at most so much at once.

Owns how far was read. A line counts once it is whole. Refuses to know which records survive.
"""

from storage.logs.step_log import MOST_STEP_LOG_BYTES, StepRecord, parse_step_records, step_log_key
from storage.stores.object_store import ObjectStore

MOST_BYTES = 4 * 1024 * 1024


class StepTail:
    """Reads the step records of a run's attempts, each from where it stopped."""

    def __init__(self, store: ObjectStore, run_prefix: str, *, most_bytes: int = MOST_BYTES) -> None:
        """Start at the beginning of every attempt; a look reads at most `most_bytes`."""
        self._store, self._prefix, self._most_bytes = store, run_prefix, most_bytes
        self._offsets: dict[int, int] = {}

    def read(self, attempt: int) -> list[StepRecord]:
        """Return the attempt's next records, none where there are no more yet."""
        offset = self._offsets.get(attempt, 0)
        data = self._read_from(step_log_key(self._prefix, attempt), offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[attempt] = offset + len(whole)
        return list(parse_step_records(whole))

    def _read_from(self, key: str, offset: int) -> bytes:
        size = self._store.size(key)
        if size is None or size <= offset:
            return b""
        path = self._store.local_path(key)
        if path is None:  # stores are read whole; there such a file changes only when a segment ends
            return self._store.read(key, at_most_bytes=MOST_STEP_LOG_BYTES)[offset : offset + self._most_bytes]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(self._most_bytes)
