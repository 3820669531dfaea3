"""Trains a segment again with the trainer's own library and digests its last state; writes only into its own folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from cairn.operations.replay_plan import Segment
from model.errors import NonFiniteLoss, TokenOutOfRange
from model.training.determinism import make_deterministic, resolve_device
from model.training.train_state import TrainState
from model.training.training_loop import StepObserver, StepResult, train_until
from storage.checkpoints.tensor_record import state_sha256
from storage.logs.run_log import RunLog
from storage.stores.document import project
from tasks.configuration.run_configuration import RunConfig
from tasks.configuration.stored_configuration import parse_stored_configuration
from tasks.trainer.tensor_exchange import to_record
from tasks.trainer.trainer_channel import Place
from tasks.trainer.trainer_protocol import TrainerSpec
from tasks.trainer.training_setup import (
    CheckpointLoad,
    TrainingData,
    fresh_state,
    open_training_data,
    restore_state,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """What a segment comes to: the digest and tensors of its last state and its steps, or why it could not go on."""

    steps: Sequence[StepResult]
    state_sha256: str | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    problem: str = ""


class SegmentReplayer:
    """Recomputes segments of one run until it is closed. Data and network stay open from segment to segment."""

    def __init__(self, log: RunLog, folder: Path) -> None:
        """Open nothing yet; `folder`, which starts empty, holds what is read of a remote store."""
        self._log, self._folder = log, folder
        self._attempt = 0
        self._data: TrainingData | None = None
        self._state: TrainState | None = None

    def recompute(self, segment: Segment, carried: Mapping[str, Tensor] | None = None) -> Recomputed:
        """Train from the stored start, or from its tensors `carried`; `IntegrityError` if start or data are damaged."""
        config = parse_stored_configuration(segment.started.config)
        place = Place(device=resolve_device(segment.started.placement.device.partition(":")[0]))
        make_deterministic(seed=config.training.seed, threads=segment.started.placement.threads)
        spec = self._spec(segment, config)
        load = CheckpointLoad(self._log.store, None if carried else spec.resume)
        if self._data is None or self._attempt != segment.started.attempt:
            self.close()
            self._data, self._attempt = open_training_data(self._log.store, spec, place), spec.attempt
        if self._state is None or spec.resume is None:
            self._state = fresh_state(spec, self._data, place)
        if carried:
            self._state.load(carried)
        else:
            restore_state(self._state, spec, self._log.store, load)
        return _train(self._state, self._data, segment.end.step)

    def _spec(self, segment: Segment, config: RunConfig) -> TrainerSpec:
        opened, started = self._log.state.opened, segment.started
        assert opened is not None
        return project(
            config,
            TrainerSpec,
            run_id=self._log.run_id,
            attempt=started.attempt,
            store_url=self._log.store.url,
            snapshot_id=opened.data_snapshot,
            training=config.training.model_copy(update={"probe_every_steps": 0}),  # the probe changes no bit
            micro_batch=started.micro_batch,
            activation_checkpointing=started.activation_checkpointing,
            quarantined=segment.quarantined,
            patience_seconds=config.checkpoint.patience_seconds,
            threads=started.placement.threads,
            resume=segment.start,
            initial_weights_sha256=opened.initial_weights_sha256,
            cache_dir=self._folder / "snapshots",
            work_dir=self._folder / "work",
            prompt="",
            faults="",
        )

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._data is not None and self._data.inputs.loader is not None:
            self._data.inputs.loader.close()
        self._data = self._state = None


def _train(state: TrainState, data: TrainingData, until_step: int) -> Recomputed:
    steps = list[StepResult]()
    observer = StepObserver(on_step=steps.append, stop_requested=lambda: False)
    try:
        train_until(state, data.inputs, observer, until_step=until_step)
    except (NonFiniteLoss, TokenOutOfRange) as error:
        return Recomputed(steps=steps, problem=str(error))
    tensors = state.named_tensors()
    return Recomputed(
        steps=steps,
        state_sha256=state_sha256(to_record(named.name, named.tensor) for named in tensors),
        tensors={named.name: named.tensor for named in tensors},
    )
