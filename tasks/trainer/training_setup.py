"""An attempt's data, and its state, into which it reads the checkpoint that it resumes from."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cairn.model.architectures import adapters, own_network
from cairn.model.data import batch_loader, token_windows
from cairn.model.errors import InvalidInput
from cairn.model.training.gradient_sum import Workers
from cairn.model.training.train_state import WEIGHT_PREFIX, TrainState, load_weights
from cairn.model.training.training_loop import Probe
from cairn.model.training.training_step import StepInputs
from cairn.storage.checkpoints.checkpoint import OpenedCheckpoint, open_checkpoint, read_tensors
from cairn.storage.errors import IntegrityError, ObjectMissing, SnapshotDamaged
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.snapshots import data_snapshot, token_shard
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.network_module import read_files
from cairn.tasks.data import foreign_tokenizer, snapshot_lookup
from cairn.tasks.trainer import initial_weights, staging, tensor_exchange, trainer_protocol
from cairn.tasks.trainer.trainer_channel import Place

_DOWNLOADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """A snapshot, and the inputs of every step and the probe that are made of it."""

    snapshot: data_snapshot.OpenSnapshot
    inputs: StepInputs
    probe: Probe | None

    def damage_next_batch(self, step: int, folder: Path) -> "TrainingData":
        """Return data with a flipped bit in the first sample of step `step` + 1, for fault injection.

        The bit is flipped in a copy of the shard in `folder`, because other runs read the store's.
        """
        windows, loader = self.inputs.windows, self.inputs.loader
        position = int(windows.first_tokens(self.inputs.order.windows_of(step))[0])
        shards = token_shard.flip_token(self.snapshot.train, position, folder)
        assert loader is not None
        loader.windows = windows.over(shards)
        loader.forget()  # it may have read the batch before the flip
        return replace(self, inputs=replace(self.inputs, windows=loader.windows))


def open_training_data(store: ObjectStore, spec: trainer_protocol.TrainerSpec, place: Place) -> TrainingData:
    """Open the spec's snapshot; its shards are verified ahead, in the background."""
    try:
        snapshot = data_snapshot.open_snapshot(store, spec.snapshot_id, spec.cache_dir)
    except (ObjectMissing, IntegrityError) as error:  # of data, which has a remedy of its own
        raise SnapshotDamaged(str(error)) from error
    token_shard.prefetch_shards((*snapshot.train, *snapshot.train_answers), threads=_DOWNLOADS)
    manifest, training = snapshot.manifest, spec.training
    sizes = spec.model.block_size, manifest.vocab_size
    windows = token_windows.TokenWindows(snapshot.train, *sizes, snapshot.train_answers)
    order = snapshot_lookup.order_samples(
        manifest, spec.data, training, spec.model.block_size, quarantined=spec.quarantined, before=spec.before
    )
    rows = place.ranks.rows(training.global_batch, spec.micro_batch)
    loader = batch_loader.BatchLoader(windows, order, place.device, end_step=training.steps, rows=rows)
    probe = None
    # A forward through a sharded model needs all ranks; otherwise only rank 0 measures and the others wait.
    if training.probe_every_steps and (place.ranks.is_first or place.ranks.is_sharded):
        tokenizer = foreign_tokenizer.parse_tokenizer(snapshot.tokenizer_json, manifest.end_of_text_id)
        probe = Probe(
            windows=token_windows.TokenWindows(snapshot.val, *sizes, snapshot.val_answers),
            training=training,
            prompt_ids=tokenizer.encode_prompt(spec.prompt, spelled=bool(snapshot.val_answers)),
            decode=tokenizer.decode,
        )
    inputs = StepInputs(windows=windows, order=order, training=training, micro_batch=spec.micro_batch, loader=loader)
    return TrainingData(snapshot=snapshot, inputs=inputs, probe=probe)


class CheckpointLoad:
    """The checkpoint that an attempt resumes from: opened in the background, then read straight into a state."""

    def __init__(self, store: ObjectStore, reference: CheckpointReference | None) -> None:
        self._store = store
        self._opened: Future[OpenedCheckpoint] | None = None
        if reference is not None:
            pool = ThreadPoolExecutor(1, "resume")
            self._opened = pool.submit(open_checkpoint, store, reference)
            pool.shutdown(wait=False)

    def beside(self, state: TrainState, initial_weights_sha256: str | None) -> None:
        """Read the weights that a run starts from, beside which adapters are trained."""
        if initial_weights_sha256 is not None:
            load_initial_weights(self._store, initial_weights_sha256, state.model)

    def into(self, state: TrainState, initial_weights_sha256: str | None = None) -> str | None:
        """Read this process's part and return the state's sha256; without a checkpoint, the weights a run starts from.

        A collective call of replicated ranks, which each read some tensors and get the others from their readers.
        Raises what reading raises; then the state is of no use any more.
        """
        if self._opened is None or state.beside:
            self.beside(state, initial_weights_sha256)
        if self._opened is None:
            return None
        opened = self._opened.result()
        manifest, trainer = opened.manifest, tensor_exchange.to_tensors(opened.trainer.tensors)
        state.check_fits({**tensor_exchange.without_values(manifest.tensors), **trainer})
        ranks, live = state.ranks, [named for named in state.live_tensors() if named.group != "trainer"]
        readers = {} if ranks.is_sharded else staging.assign_writers(live, ranks.size)
        own = [named for named in live if readers.get(named.name, ranks.rank) == ranks.rank]
        read_tensors(self._store, opened, map(tensor_exchange.wanted_bytes, own))
        if readers:
            ranks.any(False)  # a rank that could not read ends the others here and not within an exchange
            for named in live:
                ranks.broadcast(named.tensor, source=readers[named.name])
        state.load_trainer(trainer)
        return manifest.state_sha256


def load_initial_weights(store: ObjectStore, sha256: str, network: own_network.Network) -> None:
    """Read stored weights that runs begin with into a network; raises IntegrityError if a byte has changed."""
    weights = initial_weights.read_initial_weights(store, sha256).items()
    load_weights(network, {f"{WEIGHT_PREFIX}{name}": torch.from_numpy(array) for name, array in weights})


def fresh_state(store: ObjectStore, spec: trainer_protocol.TrainerSpec, data: TrainingData, place: Place) -> TrainState:
    """Return the state of step 0, without values where a checkpoint gives them; its module's files are the store's."""
    files = read_files(store, spec.model, spec.allowed_code)
    training = spec.training.model_copy(update={"activation_checkpointing": spec.activation_checkpointing})
    new, manifest = spec.resume is None, data.snapshot.manifest
    state = TrainState.create(
        spec.model, training, manifest.vocab_size, place.device, place.ranks, filled=new, files=files
    )
    if training.mask_documents:
        state.model.boundary_id = manifest.end_of_text_id
    if training.lora is not None:
        if spec.initial_weights_sha256 is None:
            raise InvalidInput("training.lora: the run's log names no weights to train beside; restore it")
        state.beside = adapters.name_base(spec.initial_weights_sha256, training.lora)
    state.before, state.workers = spec.before, Workers(spec.workers)
    return state
