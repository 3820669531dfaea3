"""A staging of checkpoints as tests use it: what it staged is kept, and read back."""

from cairn.model.training.train_state import NamedTensor
from cairn.storage.checkpoints.checkpoint import OpenedCheckpoint, checkpoint_target, load_checkpoint
from cairn.storage.checkpoints.payload import TrainerDocument, small_tensor
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.trainer.staging import HostCheckpoint, Staging
from cairn.tasks.trainer.tensor_exchange import to_group
from cairn.tasks.trainer.trainer_protocol import Waiting
from tests.storage.builders import RUN, trainer_document


def checkpoint(tensors: tuple[NamedTensor, ...], step: int) -> HostCheckpoint:
    document: TrainerDocument = trainer_document(step)
    small = tuple(small_tensor(record) for record in to_group("trainer", tensors).records)
    return HostCheckpoint(
        target=checkpoint_target(RUN, step=step, attempt=1),
        tensors=tensors,
        document=TrainerDocument(
            version=1, step=step, cursor=0, learning_rate=0.0, versions=document.versions, tensors=small
        ),
    )


class Stagings:
    """A staging over a store, and what it staged."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.staged = store, list[CheckpointReference]()
        self.staging = Staging(store, self._add, self._on_failed, patience_seconds=60)

    def _add(self, staged: StagedCheckpoint | Waiting) -> None:
        if isinstance(staged, Waiting):
            return
        self.staged.append(
            CheckpointReference(
                step=staged.step,
                attempt=staged.attempt,
                prefix=staged.prefix,
                manifest_sha256=staged.manifest_sha256,
            )
        )

    def _on_failed(self, error: Exception) -> None:
        raise error

    def loaded(self, number: int) -> OpenedCheckpoint:
        return load_checkpoint(self.store, self.staged[number])
