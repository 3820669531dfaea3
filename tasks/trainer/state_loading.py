"""Makes an attempt's train state, while the checkpoint it resumes from is read and verified in the background."""

from concurrent.futures import Future, ThreadPoolExecutor

from model.training.train_state import WEIGHT_PREFIX, TrainState, load_weights
from storage.checkpoints.checkpoint import LoadedCheckpoint, load_checkpoint
from storage.logs.log_entry import CheckpointReference
from storage.stores.object_store import ObjectStore
from tasks.trainer.initial_weights import read_initial_weights
from tasks.trainer.rank_channel import Place
from tasks.trainer.staging_buffer import StagingBuffer
from tasks.trainer.tensor_exchange import to_tensors
from tasks.trainer.trainer_protocol import TrainerSpec
from tasks.trainer.training_data import TrainingData

_DOWNLOADS = 4


class CheckpointLoad:
    """A checkpoint that is being read into the staging buffer, where the next checkpoints will be copied to."""

    def __init__(self, store: ObjectStore, reference: CheckpointReference | None, buffer: StagingBuffer) -> None:
        """Start to read, unless `reference` is None."""
        self._loaded: Future[LoadedCheckpoint] | None = None
        if reference is not None:
            pool = ThreadPoolExecutor(1, "resume")
            self._loaded = pool.submit(load_checkpoint, store, reference, downloads=_DOWNLOADS, buffers=buffer.buffers)
            pool.shutdown(wait=False)

    def result(self) -> LoadedCheckpoint | None:
        """Wait for the checkpoint, whose tensors are views of the buffer; call it once. Raises what reading raised."""
        loaded, self._loaded = self._loaded, None
        return None if loaded is None else loaded.result()


def fresh_state(spec: TrainerSpec, data: TrainingData, place: Place) -> TrainState:
    """Return the state of step 0."""
    training = spec.training.model_copy(update={"activation_checkpointing": spec.activation_checkpointing})
    state = TrainState.create(spec.model, training, data.vocab_size, place.device, place.ranks)
    if training.mask_documents:
        state.model.boundary_id = data.end_of_text_id
    return state


def restore_state(state: TrainState, spec: TrainerSpec, store: ObjectStore, load: CheckpointLoad) -> str | None:
    """Load the checkpoint into `state`, or the weights the run starts from; returns the checkpoint's state_sha256."""
    loaded = load.result()
    if loaded is not None:
        state.load(to_tensors([*loaded.tensors, *loaded.trainer.records()]))
        return loaded.state_sha256
    if spec.initial_weights_sha256 is not None:
        weights = to_tensors(read_initial_weights(store, spec.initial_weights_sha256))
        load_weights(state.model, {f"{WEIGHT_PREFIX}{name}": tensor for name, tensor in weights.items()})
    return None
