"""Reading the checkpoint an attempt resumes from, while data, model and optimizer are still being made.

Owns the thread. Every byte is verified before one is used, and lies in the host copy's memory, where the checkpoints
to come will lie. Refuses to become the state: that is for whoever waits here.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from storage.checkpoints.checkpoint import LoadedCheckpoint, load_checkpoint
from storage.logs.log_entry import CheckpointReference
from storage.stores.object_store import ObjectStore
from tasks.trainer.staging_buffer import StagingBuffer

_DOWNLOADS = 4


class CheckpointReading:
    """One checkpoint on its way into memory."""

    def __init__(self, store: ObjectStore, reference: CheckpointReference | None, host_copy: StagingBuffer) -> None:
        """Begin to read; without a reference there is nothing to read."""
        self._loaded: Future[LoadedCheckpoint] | None = None
        if reference is not None:
            pool = ThreadPoolExecutor(1, "resume")
            self._loaded = pool.submit(
                load_checkpoint, store, reference, downloads=_DOWNLOADS, buffers=host_copy.buffers
            )
            pool.shutdown(wait=False)

    def result(self) -> LoadedCheckpoint | None:
        """Wait for the checkpoint, once: its tensors are views of the host copy; raises what reading it raised."""
        loaded, self._loaded = self._loaded, None
        return None if loaded is None else loaded.result()
