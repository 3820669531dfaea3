"""A store with nothing but the step records of one run, and how much of them was read."""

import msgspec

from cairn.storage.logs.step_log import StepRecord, step_log_key
from tests import entries
from tests.memory_store import MemoryStore


def step_record(step: int, *, attempt: int = 1, loss: float = 2.0, grad_norm: float = 0.5) -> StepRecord:
    """Return the record of a step of a warmed-up run."""
    rate = 1e-3 * min(step / 100, 1.0)
    return entries.step_record(step, attempt, train_loss=loss, lr=rate, grad_norm=grad_norm, tokens_per_second=1000.0)


class LongRun(MemoryStore):
    """Grows by what its attempts train; a loss tells which attempt it was."""

    def __init__(self) -> None:
        super().__init__("long")
        self.records: list[StepRecord] = []
        self.read_bytes = 0

    def train(self, attempt: int, first: int, last: int) -> None:
        """Append the records of these steps, both included."""
        made = [step_record(step, attempt=attempt, loss=step + attempt / 100) for step in range(first, last + 1)]
        self.records += made
        key = step_log_key("runs/r", attempt)
        before = self._objects.get(key, b"")
        self.write(key, before + b"".join(msgspec.json.encode(record) + b"\n" for record in made))

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        found = super().read_range(key, start, into)
        self.read_bytes += found
        return found
