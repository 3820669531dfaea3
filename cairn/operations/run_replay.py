"""Recomputes committed segments of a run from the store alone and compares the digests of the states they end with.

Writes nothing into the store: no entry, no lease, no cache. A segment that differs is computed twice.
"""

import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from cairn.model.errors import NonFiniteLoss, TokenOutOfRange
from cairn.model.training import determinism, train_state, training_loop
from cairn.operations import replay_plan
from cairn.operations.replay_plan import Replay, ReplayedSegment, ReplayOutcome, Segment
from cairn.storage.checkpoints.payload import state_sha256
from cairn.storage.errors import IntegrityError, SnapshotDamaged
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.step_log import read_attempt_records
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from cairn.tasks.machine.placement import library_versions
from cairn.tasks.trainer import tensor_exchange, trainer_channel, trainer_protocol, training_setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """A recomputed segment: its steps, the digest and tensors of its last state, or why it could not go on."""

    steps: Sequence[training_loop.StepResult]
    state_sha256: str | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    problem: str = ""


class _SegmentReplayer:
    """Recomputes segments of one run until it is closed; keeps a state that a later one needs and the store lacks."""

    def __init__(self, log: RunLog, segments: Sequence[Segment], folder: Path) -> None:
        """Open nothing yet; `folder`, which starts empty, holds copies of a remote store's objects."""
        self._log, self._folder = log, folder
        self._attempt = 0
        self._data: training_setup.TrainingData | None = None
        self._state: train_state.TrainState | None = None
        self._needed_until = {item.start.prefix: item for item in segments if item.unloadable and item.start}
        self._reached: dict[str, Mapping[str, Tensor]] = {}

    def _recompute(self, segment: Segment, carried: Mapping[str, Tensor] | None = None) -> Recomputed:
        """Train from the stored start, or from its tensors `carried`; `IntegrityError` if start or data are damaged."""
        config = parse_stored_configuration(segment.started.config)
        kind, _, _ = segment.started.placement.device.partition(":")
        place = trainer_channel.Place(device=determinism.resolve_device(kind))
        determinism.make_deterministic(seed=config.training.seed, threads=segment.started.placement.threads)
        spec = self._spec(segment, config)
        load = training_setup.CheckpointLoad(self._log.store, None if carried else spec.resume)
        if self._data is None or self._attempt != segment.started.attempt:
            self.close()
            self._data, self._attempt = training_setup.open_training_data(self._log.store, spec, place), spec.attempt
        if self._state is None or spec.resume is None:
            self._state = training_setup.fresh_state(spec, self._data, place)
        if carried:
            self._state.load(carried)
        else:
            load.into(self._state, spec.initial_weights_sha256)
        steps = list[training_loop.StepResult]()
        observer = training_loop.StepObserver(on_step=steps.append, stop_requested=lambda: False)
        try:
            training_loop.train_until(self._state, self._data.inputs, observer, until_step=segment.end.step)
        except (NonFiniteLoss, TokenOutOfRange) as error:
            return Recomputed(steps=steps, problem=str(error))
        tensors = {named.name: named.tensor for named in self._state.named_tensors()}
        digest = state_sha256(tensor_exchange.to_record(name, tensor) for name, tensor in tensors.items())
        return Recomputed(steps=steps, state_sha256=digest, tensors=tensors)

    def _spec(self, segment: Segment, config: RunConfig) -> trainer_protocol.TrainerSpec:
        opened, started = self._log.state.opened, segment.started
        assert opened is not None
        return trainer_protocol.TrainerSpec(
            run_id=self._log.run_id,
            attempt=started.attempt,
            store_url=self._log.store.url,
            snapshot_id=opened.data_snapshot,
            data=config.data,
            model=config.model,
            training=config.training.model_copy(update={"probe_every_steps": 0}),  # the probe changes no bit
            micro_batch=started.micro_batch,
            activation_checkpointing=started.activation_checkpointing,
            quarantined=segment.quarantined,
            divergence=config.divergence,
            patience_seconds=config.checkpoint.patience_seconds,
            threads=started.placement.threads,
            resume=segment.start,
            initial_weights_sha256=opened.initial_weights_sha256,
            cache_dir=self._folder / "snapshots",
            work_dir=self._folder / "work",
        )

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._data is not None and self._data.inputs.loader is not None:
            self._data.inputs.loader.close()
        self._data = self._state = None

    def replay(self, segment: Segment) -> ReplayedSegment:
        """Recompute a segment and return its outcome; raises `SnapshotDamaged`."""
        began, end = time.monotonic(), segment.end
        row = ReplayedSegment(from_step=segment.from_step, placement=segment.started.placement, end=end)
        config, here = parse_stored_configuration(segment.started.config), library_versions()["torch"]
        why = replay_plan.find_obstacle(segment.started, config, torch_version=here, has_cuda=torch.cuda.is_available())
        carried = None
        if segment.unloadable and segment.start:
            carried = self._reached.get(segment.start.prefix)
            if self._needed_until[segment.start.prefix] is segment:
                self._reached.pop(segment.start.prefix, None)
            if carried is None:
                why = why or f"{segment.unloadable}, and no segment replayed before ends there"
        if why:
            return replace(row, why=why)
        try:
            first = self._recompute(segment, carried)
            if first.state_sha256 == end.state_sha256:
                if segment.end.prefix in self._needed_until:
                    self._reached[segment.end.prefix] = first.tensors
                found = replace(row, outcome=ReplayOutcome.EQUAL, computed_sha256=first.state_sha256)
            else:
                found = self._explain(row, segment, first, self._recompute(segment, carried))
        except SnapshotDamaged:
            raise
        except IntegrityError as error:
            record = self._log.refresh().find(segment.start.prefix) if segment.start else None
            if record is None or record.is_committed:
                why = f"{error}; `cairn verify {self._log.run_id}` reads everything"
                return replace(row, outcome=ReplayOutcome.UNREADABLE, why=why)
            # By retention, while others were replayed.
            return replace(row, why=f"its start, the checkpoint of step {segment.from_step}, is {record.state} by now")
        return replace(found, seconds=round(time.monotonic() - began, 3))

    def _explain(self, row: ReplayedSegment, segment: Segment, first: Recomputed, again: Recomputed) -> ReplayedSegment:
        if first.state_sha256 != again.state_sha256:
            why = "two recomputations here differ from each other: this machine may be what is sick, ask another one"
            return replace(row, outcome=ReplayOutcome.UNDECIDED, computed_sha256=again.state_sha256, why=why)
        records = read_attempt_records(self._log.store, self._log.prefix, segment.started.attempt)
        last, different = replay_plan.compare_steps(records, again.steps, from_step=segment.from_step)
        what = f"the record of step {different} differs first" if different else "every step's record agrees"
        stopped = f"; the recomputation ends with: {again.problem}" if again.problem else ""
        if row.placement.host != (here := socket.gethostname()):
            stopped += f"; trained on {row.placement.host}, this is {here}: bits differ between kinds of machines"
        return replace(
            row,
            outcome=ReplayOutcome.DIFFERENT,
            computed_sha256=again.state_sha256,
            last_equal_step=last,
            first_different_step=different,
            why=f"{what}: what changed the run came after the record of step {last}{stopped}",
        )


def replay_run(
    log: RunLog, choose: Callable[[Sequence[Segment]], Sequence[Segment]], on_segment: Callable[[ReplayedSegment], None]
) -> Replay:
    """Recompute the committed segments that `choose` returns, in order; `SnapshotDamaged` where their data is."""
    segments, found = replay_plan.committed_segments(log.state), list[ReplayedSegment]()
    chosen = choose(segments)
    with (
        tempfile.TemporaryDirectory(prefix="cairn-replay-") as folder,
        closing(_SegmentReplayer(log, chosen, Path(folder))) as replayer,
    ):
        for segment in chosen:
            found.append(replayer.replay(segment))
            on_segment(found[-1])
    outcomes = {str(outcome): sum(item.outcome is outcome for item in found) for outcome in ReplayOutcome}
    return Replay(version=1, run_id=log.run_id, committed=len(segments), outcomes=outcomes, segments=tuple(found))
