"""A staging of checkpoints as tests use it: what it staged is kept, and read back."""

from collections.abc import Callable, Sequence

from cairn.model.training.train_state import NamedTensor
from cairn.storage.checkpoints.checkpoint import OpenedCheckpoint, checkpoint_target, load_checkpoint
from cairn.storage.checkpoints.payload import TrainerDocument, small_tensor
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.trainer.staging import HostCheckpoint, Staging
from cairn.tasks.trainer.tensor_exchange import to_group
from cairn.tasks.trainer.trainer_protocol import Waiting
from tests.storage.builders import RUN


def document_of(tensors: Sequence[NamedTensor], step: int = 0) -> TrainerDocument:
    """Return a trainer's document whose small tensors are those of its group."""
    small = tuple(small_tensor(record) for record in to_group("trainer", tensors).records)
    return TrainerDocument(version=1, step=step, cursor=0, learning_rate=0.0, versions={}, tensors=small)


def checkpoint(tensors: tuple[NamedTensor, ...], step: int) -> HostCheckpoint:
    target = checkpoint_target(RUN, step=step, attempt=1)
    return HostCheckpoint(target=target, tensors=tensors, document=document_of(tensors, step))


class Stagings:
    """A staging over a store, and what it staged, why it waited, and the errors that it reported."""

    def __init__(self, store: ObjectStore, *, patience_seconds: float = 60) -> None:
        self.store, self.staged = store, list[StagedCheckpoint]()
        self.waiting, self.failed = list[str](), list[str]()
        self.staging = Staging(store, self._add, self._on_failed, patience_seconds=patience_seconds)

    def _add(self, event: StagedCheckpoint | Waiting) -> None:
        if isinstance(event, Waiting):
            self.waiting.append(event.why)
        else:
            self.staged.append(event)

    def _on_failed(self, error: Exception) -> None:
        self.failed.append(str(error))

    def stage(self, tensors: tuple[NamedTensor, ...], step: int, before: Callable[[], None] = lambda: None) -> None:
        """Begin to stage these tensors as the checkpoint of a step."""
        self.staging.begin(checkpoint(tensors, step), before=before)

    def loaded(self, number: int) -> OpenedCheckpoint:
        """Read a staged checkpoint back; nothing has failed."""
        assert not self.failed
        return load_checkpoint(self.store, self.staged[number])
