"""Training that leaves no record: a replay of a run's committed segments, and one batch that is learned by heart.

A replay recomputes segments from the store alone and compares the digests of the states they end with; a segment that
differs is computed twice. `cairn train --overfit-one-batch` asks whether this network, at this learning rate, can learn
a few windows by heart; text, tokenizer, network, numerics and optimizer are the run's own. Both write nothing into the
store: no entry, no lease, no cache. Source: Karpathy 2019, "A Recipe for Training Neural Networks".
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

from cairn.model.configuration.data import DataConfig
from cairn.model.data.sample_order import Component, SampleOrder
from cairn.model.errors import InvalidInput, NonFiniteLoss, TokenOutOfRange
from cairn.model.training import determinism, train_state, training_loop
from cairn.operations import unrecorded_plan
from cairn.operations.unrecorded_plan import BatchOverfit, Replay, ReplayedSegment, ReplayOutcome, Segment
from cairn.storage.checkpoints.payload import state_sha256
from cairn.storage.errors import IntegrityError, SnapshotDamaged
from cairn.storage.logs import run_entries, step_log
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.child_process import temporary_folder
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration import configuration_source, network_module
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import parse_stored_configuration
from cairn.tasks.data import corpus, snapshot_build, snapshot_lookup
from cairn.tasks.machine.arithmetic import arithmetic_of
from cairn.tasks.machine.placement import library_versions, usable_cores
from cairn.tasks.policy.attempt_sizes import most_workers, sizes_of
from cairn.tasks.trainer import tensor_exchange, trainer_channel, trainer_protocol, training_setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """A recomputed segment: its steps, the digest and tensors of its last state, or why it could not go on."""

    steps: Sequence[training_loop.StepResult]
    state_sha256: str | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
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
        self._reached: dict[str, Mapping[str, torch.Tensor]] = {}

    def _recompute(self, segment: Segment, carried: Mapping[str, torch.Tensor] | None = None) -> Recomputed:
        """Train from the stored start, or from its tensors `carried`; `IntegrityError` if start or data are damaged."""
        config = parse_stored_configuration(segment.started.config)
        kind, _, _ = segment.started.placement.device.partition(":")
        place = trainer_channel.Place(device=determinism.resolve_device(kind))
        make_deterministic(segment.started, config)
        spec = self._spec(segment, config)
        load = training_setup.CheckpointLoad(self._log.store, None if carried else spec.resume)
        if self._data is None or self._attempt != segment.started.attempt:
            self.close()
            self._data, self._attempt = training_setup.open_training_data(self._log.store, spec, place), spec.attempt
        if self._state is None or spec.resume is None:
            self._state = training_setup.fresh_state(self._log.store, spec, self._data, place)
        if not carried or self._state.beside:
            load.into(self._state, spec.initial_weights_sha256)
        if carried:
            self._state.load(carried)
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
        count, sizes = {"processes": 1, "cores": usable_cores()}, sizes_of(started)
        on_device = started.placement.device != "cpu"
        return trainer_protocol.TrainerSpec(
            run_id=self._log.run_id,
            attempt=started.attempt,
            store_url=self._log.store.url,
            snapshot_id=opened.data_snapshot,
            data=config.data,
            model=config.model,
            allowed_code=configuration_source.allowed_code(os.environ),
            training=config.training.model_copy(update={"probe_every_steps": 0}),  # the probe changes no bit
            micro_batch=started.micro_batch,
            activation_checkpointing=started.activation_checkpointing,
            quarantined=segment.quarantined,
            divergence=config.divergence,
            patience_seconds=config.checkpoint.patience_seconds,
            threads=started.placement.threads,
            workers=1 if on_device else most_workers(config.training, config.model, sizes, **count),
            devices=started.placement.devices,
            resume=segment.start,
            initial_weights_sha256=opened.initial_weights_sha256,
            before=trainer_protocol.trained_before(opened.forked_from),
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
        config, torch_version = parse_stored_configuration(segment.started.config), library_versions()["torch"]
        has_cuda = torch.cuda.is_available()
        why = unrecorded_plan.find_obstacle(segment.started, config, torch_version=torch_version, has_cuda=has_cuda)
        if not why:
            make_deterministic(segment.started, config)
            here = arithmetic_of(str(determinism.resolve_device(config.training.device)), config.training.arithmetic)
            why = unrecorded_plan.find_other_arithmetic(segment.arithmetic, here)
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
        attempt = self._log.state.attempt(segment.started.attempt)
        records = step_log.read_step_records(self._log.store, self._log.prefix, [attempt])
        last, different = unrecorded_plan.compare_steps(records, again.steps, from_step=segment.from_step)
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


def make_deterministic(started: run_entries.AttemptStarted, config: RunConfig) -> None:
    """Have this process compute as the attempt's trainer did."""
    threads, training = started.placement.threads, config.training
    determinism.make_deterministic(seed=training.seed, threads=threads, arithmetic=training.arithmetic)


def replay_run(
    log: RunLog, choose: Callable[[Sequence[Segment]], Sequence[Segment]], on_segment: Callable[[ReplayedSegment], None]
) -> Replay:
    """Recompute the committed segments that `choose` returns, in order; `SnapshotDamaged` where their data is."""
    segments, found = unrecorded_plan.committed_segments(log.state), list[ReplayedSegment]()
    chosen = choose(segments)
    with temporary_folder("cairn-replay-") as folder, closing(_SegmentReplayer(log, chosen, folder)) as replayer:
        for segment in chosen:
            found.append(replayer.replay(segment))
            on_segment(found[-1])
    outcomes = {str(outcome): sum(item.outcome is outcome for item in found) for outcome in ReplayOutcome}
    return Replay(version=1, run_id=log.run_id, committed=len(segments), outcomes=outcomes, segments=tuple(found))


BY_HEART = 0.1  # nats a token: far below what any text allows a network that has not seen it
WINDOWS, STEPS, WARMUP_STEPS = 4, 1000, 10
_TEXT_BYTES, _BYTES_OF_ID = 4 << 20, 400


def overfit_one_batch(config: RunConfig, log: RunLog, base_dir: Path, say: Callable[[str], None]) -> BatchOverfit:
    """Train on one batch until it is known by heart, at most `STEPS` steps; `config` has its numerics chosen."""
    if config.training.lora is not None:
        problem = "--overfit-one-batch: begins with random weights, beside which adapters learn nothing"
        raise InvalidInput(f"{problem}; leave training.lora out, or train some steps")
    problem, steps = "", list[training_loop.StepResult]()

    def follow(result: training_loop.StepResult) -> None:
        steps.append(result)
        if result.step % 25 == 1:
            say(f"step {result.step} · loss {result.train_loss:.3f}")

    with temporary_folder("cairn-overfit-") as folder:
        store, snapshot_id = _find_text(config, log, base_dir, folder)
        training = config.training
        place = trainer_channel.Place(device=determinism.resolve_device(training.device))
        determinism.make_deterministic(seed=training.seed, threads=training.threads, arithmetic=training.arithmetic)
        spec = _spec(config, store, snapshot_id, folder)
        data = training_setup.open_training_data(store, spec, place)
        assert data.inputs.loader is not None
        data.inputs.loader.close()
        count = data.inputs.windows.window_count
        few = (Component(first_window=0, window_count=min(WINDOWS, count)),)  # every epoch of them is this one batch
        order = SampleOrder(window_count=count, seed=spec.training.seed, global_batch=WINDOWS, components=few)
        code = LocalStore(folder / "code")
        network_module.keep_files(code, config.model, config.code.files)
        state = training_setup.fresh_state(code, spec, data, place)
        observer = training_loop.StepObserver(
            on_step=follow, stop_requested=lambda: bool(steps) and steps[-1].train_loss < BY_HEART
        )
        try:
            training_loop.train_until(state, replace(data.inputs, order=order, loader=None), observer, until_step=STEPS)
        except NonFiniteLoss as error:
            problem = str(error)
    losses = tuple(step.train_loss for step in steps)
    sound, why = judge_losses(losses, problem, lr=config.training.lr)
    return BatchOverfit(
        sound=sound,
        why=why,
        windows=few[0].window_count,
        tokens=few[0].window_count * config.model.block_size,
        parameters=state.model.parameter_count,
        lr=config.training.lr,
        precision=config.training.precision,
        device=str(place.device),
        losses=losses,
    )


def _find_text(config: RunConfig, log: RunLog, base_dir: Path, folder: Path) -> tuple[ObjectStore, str]:
    """Return store and snapshot of the run, or of the beginning of its text in a store of its own."""
    if log.state.opened is not None:
        return log.store, log.state.opened.data_snapshot
    if config.data.snapshot:
        return log.store, snapshot_lookup.find_by_id(log.store, config.data.snapshot).snapshot_id

    store, beginning = LocalStore(folder / "store"), folder / "beginning.txt"
    wanted = max(_TEXT_BYTES, _BYTES_OF_ID * (config.data.bpe_vocab_size or 0), 64 * WINDOWS * config.model.block_size)
    documents = chain.from_iterable(source.documents() for source in corpus.preview_corpus(config.data, base_dir))
    with beginning.open("w", encoding="utf-8") as file:
        for document in documents:  # until there is text enough for the windows and the tokenizer
            file.write(f"{document.text}\n")
            if (wanted := wanted - document.bytes) <= 0:
                break
    kept = config.data.model_dump(include={"tokenizer", "end_of_text", "max_rejected_fraction"})
    data = DataConfig(sources=(str(beginning),), format="text", split="end", **kept)
    return store, snapshot_build.build_snapshot(store, data, base_dir).snapshot_id


def _spec(config: RunConfig, store: ObjectStore, snapshot_id: str, folder: Path) -> trainer_protocol.TrainerSpec:
    """Return the spec of a trainer of few windows, at the full rate all along and without dropout."""
    few = {"steps": STEPS, "global_batch": WINDOWS, "micro_batch": WINDOWS, "probe_every_steps": 0}
    steady, given = {"warmup_steps": WARMUP_STEPS, "min_lr": config.training.lr}, config.model.arguments or {}
    without = {"arguments": {**given, "dropout": 0.0}} if "dropout" in given else {}
    return trainer_protocol.TrainerSpec(
        run_id="overfit-one-batch",
        attempt=1,
        store_url=store.url,
        snapshot_id=snapshot_id,
        data=config.data.model_copy(update={"weights": (), "stages": ()}),
        model=config.model.model_copy(update={"dropout": 0.0, **without}),
        allowed_code=config.code.allow,
        training=config.training.model_copy(update={**few, **steady}),
        micro_batch=WINDOWS,
        activation_checkpointing=config.training.activation_checkpointing,
        divergence=config.divergence,
        patience_seconds=config.checkpoint.patience_seconds,
        threads=config.training.threads,
        cache_dir=folder / "snapshots",
        work_dir=folder / "work",
    )


def judge_losses(losses: Sequence[float], problem: str, *, lr: float) -> tuple[bool, str]:
    """Return whether the batch was learned, and why; `problem` says why there are no more losses, empty for none."""
    lower = f"lower training.lr (now {lr:g})"
    if problem:
        return False, f"{problem}: {lower}, or try training.precision = fp32"
    course = f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
    if losses[-1] < BY_HEART:
        return True, f"{course}: text, network and optimizer fit together, and the batch is known by heart"
    if losses[-1] > losses[0] or min(losses) < losses[-1] / 2:
        return False, f"{course} and was {min(losses):.3f} in between: it jumps; {lower}"
    why = f"raise training.lr (now {lr:g}) or make the network larger"
    return False, f"{course}, and {BY_HEART:g} is by heart: too slow or too small; {why}"
