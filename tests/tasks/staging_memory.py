"""Stages a state twice and reads it back (`python -m tests.tasks.staging_memory FOLDER`); prints what memory each took.

Each is the peak beside the state, as a multiple of the state.
"""

import sys
from pathlib import Path

import torch

from cairn.model.training.train_state import NamedTensor
from cairn.storage.checkpoints.checkpoint import open_checkpoint, read_tensors
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.trainer.tensor_exchange import wanted_bytes
from tests.tasks.rank_resume import resident
from tests.tasks.stagings import Stagings


def main() -> None:
    """Measure in a process of its own."""
    stagings = Stagings(store := LocalStore(Path(sys.argv[1])))
    tensors = tuple(NamedTensor(name=f"w{n}", group="weights", tensor=torch.ones(1 << 20)) for n in range(16))
    state, before = sum(named.tensor.nbytes for named in tensors), resident("VmRSS")
    # getrusage's maximum would begin with that of the process that started this one
    Path("/proc/self/clear_refs").write_text("5")
    for step in (1, 2):
        stagings.stage(stagings.staging.copy(tensors), step)
    stagings.staging.wait()
    print((resident("VmHWM") - before) / state)
    opened = open_checkpoint(store, stagings.staged[-1])
    read_tensors(store, opened, list(map(wanted_bytes, tensors)))
    print((resident("VmHWM") - before) / state)


if __name__ == "__main__":
    main()
