"""The trainer: the child process that holds the tensors for one whole attempt.

Run as `python -m tasks.trainer.trainer`. Loads, trains, and stages in the background. It never
commits, so however it dies, nothing it did counts until its parent says so. It dies with its parent: end of file on
stdin ends it at once. Where one model has several processes, each is one of these, started by torchrun's agent.
"""

import os
import platform
import signal
import threading
import time
from collections import deque
from dataclasses import asdict
from functools import partial
from typing import NoReturn

import numpy as np
import torch

from model.data.batch_loader import BatchLoader
from model.errors import BadBatch, LossExploded, NonFiniteLoss, TokenOutOfRange
from model.training.determinism import choose_deterministic_kernels, make_deterministic, resolve_device
from model.training.divergence import BASELINE_STEPS, find_bad_windows, find_spike
from model.training.train_state import TrainState
from model.training.training_loop import LoopOutcome, StepObserver, StepResult, default_fetch_schedule, train_until
from model.training.training_step import StepInputs
from model.training.weights import WEIGHT_PREFIX, load_weights
from storage.checkpoints.checkpoint import StagedCheckpoint, checkpoint_target
from storage.checkpoints.trainer_document import TrainerDocument, small_tensor
from storage.logs.run_log import run_prefix
from storage.logs.step_log import StepLog, StepRecord
from storage.stores.open_store import open_store
from tasks.trainer.checkpoint_reading import CheckpointReading
from tasks.trainer.fault_injection import BAD_DATA, OOM, TRAINER_KINDS, due, flip_byte, parse_faults, strike_process
from tasks.trainer.initial_weights import read_initial_weights
from tasks.trainer.parent_channel import Line
from tasks.trainer.rank_channel import Place, fall, join, open_line, own_threads
from tasks.trainer.shared_staging import SharedStaging
from tasks.trainer.staging import HostCheckpoint, Reports, Staging
from tasks.trainer.staging_buffer import StagingBuffer
from tasks.trainer.tensor_exchange import to_group, to_tensors
from tasks.trainer.trainer_protocol import Ready, SegmentDone, StepDone, TrainerSpec, TrainUntil, Waiting
from tasks.trainer.training_data import TrainingData


class Trainer:
    """One attempt's training: state, data, and the staging that overlaps it."""

    def __init__(self, order: TrainerSpec, line: Line, stop: threading.Event, place: Place | None = None) -> None:
        """Open data and state; resumes from the order's checkpoint, verified on the way in.

        `place` is this process's among several; without one it is the only one.
        """
        self._order, self._line, self._stop = order, line, stop
        place = place or Place(device=resolve_device(order.training.device))
        self._ranks, device = place.ranks, place.device
        self._started = time.monotonic()
        self._store = open_store(order.store_url)
        self._prefix = run_prefix(order.run_id)
        host_copy = StagingBuffer(device)
        self._resumed = CheckpointReading(self._store, order.resume, host_copy)
        data = TrainingData.opened(self._store, order)
        self._windows, self._sample_order = data.windows, data.order
        # A forward through a sharded model takes all of them; otherwise rank 0 measures while the others wait.
        self._probe = data.probe if self._ranks.is_first or self._ranks.is_sharded else None
        training = order.training.model_copy(update={"activation_checkpointing": order.activation_checkpointing})
        self._state = TrainState.create(order.model, training, data.vocab_size, device, self._ranks)
        if training.mask_documents:
            self._state.model.boundary_id = data.end_of_text_id
        self._loader = BatchLoader(
            self._windows,
            self._sample_order,
            self._state.device,
            end_step=order.training.steps,
            rows=self._ranks.rows(order.training.global_batch),
        )
        self._steps = StepLog(self._store, self._prefix, order.attempt, spool_dir=order.work_dir)
        self._faults, self._train_files = parse_faults(order.faults), data.files
        reports = Reports(staged=self._on_staged, waiting=self._on_waiting, failed=partial(fall, line))
        tensors = self._state.live_tensors()
        shared = SharedStaging(self._ranks, place.meeting, tensors) if place.meeting else None
        self._staging = Staging(
            self._store, reports, patience_seconds=order.patience_seconds, host_copy=host_copy, shared=shared
        )
        self._losses: deque[float] = deque(maxlen=BASELINE_STEPS + order.divergence.patience_steps)
        self._tokens = 0
        self._lr = 0.0

    def resume(self) -> None:
        """Load the checkpoint the parent chose, or the weights the run begins from, and say that training can begin."""
        digest = None
        loaded = self._resumed.result()
        if loaded is not None:
            self._state.load(to_tensors([*loaded.tensors, *loaded.trainer.records()]))
            digest = loaded.state_sha256
        elif self._order.initial_weights_sha256 is not None:
            weights = to_tensors(read_initial_weights(self._store, self._order.initial_weights_sha256))
            load_weights(self._state.model, {f"{WEIGHT_PREFIX}{name}": tensor for name, tensor in weights.items()})
        self._line.send(
            Ready(
                step=self._state.step,
                state_sha256=digest,
                parameters=self._state.model.parameter_count,
                device=str(self._state.device),
            )
        )

    def train_segment(self, until_step: int) -> None:
        """Train, copy the state to the host, and stage it in the background while the next segment trains."""
        self._staging.prepare(self._state.live_tensors())
        try:
            outcome = self._train_until(until_step)
        except (NonFiniteLoss, TokenOutOfRange) as error:
            self._convict(error)
        tensors = self._staging.copy(self._state.live_tensors())
        document = TrainerDocument(
            version=1,
            step=self._state.step,
            cursor=self._state.cursor,
            learning_rate=self._lr,
            versions={"python": platform.python_version(), "torch": str(torch.__version__)},
            tensors=tuple(small_tensor(record) for record in to_group("trainer", tensors).records),
        )
        checkpoint = HostCheckpoint(
            target=checkpoint_target(self._order.run_id, step=document.step, attempt=self._order.attempt),
            tensors=tensors,
            document=document,
        )
        self._line.send(
            SegmentDone(
                step=outcome.step, stopped=outcome.stopped, tokens=self._tokens, gpu_seconds=self._gpu_seconds()
            )
        )
        self._staging.begin(checkpoint, before=self._steps.publish if self._ranks.is_first else _nothing)

    def finish(self) -> None:
        """Stop reading ahead, and wait until the checkpoint under way is staged, by every rank."""
        self._loader.close()
        self._staging.wait()
        self._ranks.any(False)

    def _train_until(self, until_step: int) -> LoopOutcome:
        inputs = StepInputs(
            windows=self._windows,
            order=self._sample_order,
            training=self._order.training,
            micro_batch=self._order.micro_batch,
            loader=self._loader,
        )
        observer = StepObserver(
            on_step=self._on_step,
            stop_requested=lambda: self._ranks.any(self._stop.is_set()),
            probe=self._probe,
        )
        schedule = default_fetch_schedule(self._state, at_steps=[fault.number for fault in self._faults])
        return train_until(self._state, inputs, observer, until_step=until_step, schedule=schedule)

    def _convict(self, error: NonFiniteLoss | TokenOutOfRange) -> NoReturn:
        """Find the samples to blame; where all of them fail it is the weights, and the error stands as it is."""
        step, drawn = self._state.step + 1, self._sample_order.windows_of(self._state.step)
        guilty = find_bad_windows(self._state, self._windows, drawn, training=self._order.training)
        if isinstance(error, TokenOutOfRange):
            raise BadBatch(step=step, windows=guilty, why="token ids outside the vocabulary") from error
        if 0 < len(guilty) < len(set(drawn.tolist())):
            raise BadBatch(step=step, windows=guilty, why=f"{error.quantity} is {error.value}") from error
        raise NonFiniteLoss(step=step, quantity=error.quantity, value=error.value, windows=drawn.tolist()) from error

    def _on_staged(self, staged: StagedCheckpoint) -> None:
        self._line.send(staged)

    def _on_waiting(self, step: int, why: str, seconds: float) -> None:
        self._line.send(Waiting(step=step, why=why, seconds=seconds))

    def _check_course(self, record: StepResult) -> None:
        rule = self._order.divergence
        self._losses.append(record.train_loss)
        spike = find_spike(list(self._losses), patience=rule.patience_steps, rise=rule.rise_nats)
        if spike is None:
            return
        first = record.step - spike.steps + 1
        drawn = [window for step in range(first, record.step + 1) for window in self._sample_order.windows_of(step - 1)]
        raise LossExploded(
            step=record.step, spike_step=first, level=spike.level, baseline=spike.baseline, windows=drawn
        )

    def _on_step(self, record: StepResult) -> None:
        self._lr = record.lr
        self._tokens += self._order.training.global_batch * self._order.model.block_size
        if self._ranks.is_first:
            self._tell(record)
        self._check_course(record)
        if not self._ranks.is_first:
            return
        for kind in due(self._faults, self._store, self._prefix, record.step, kinds=TRAINER_KINDS):
            self._strike(kind)

    def _tell(self, record: StepResult) -> None:
        stored = step_record(record, self._order.attempt)
        self._steps.write(stored)
        self._line.send(StepDone(record=stored, tokens=self._tokens, gpu_seconds=self._gpu_seconds()))

    def _strike(self, kind: str) -> None:
        """Practise a failure: the allocator's and the data's need what only this process has."""
        if kind == OOM:
            torch.empty(1 << 60, dtype=torch.uint8)
        elif kind == BAD_DATA:
            window = self._sample_order.windows_of(self._state.step)[:1]  # the first sample of the next step
            flip_byte(self._train_files, self._windows.gather(window)[0].astype(np.uint16).tobytes())
            self._loader.forget()  # read ahead before the flip, and sound
        else:
            strike_process(kind)

    def _gpu_seconds(self) -> float:
        return (time.monotonic() - self._started) * self._ranks.size


def main() -> None:
    """Serve one attempt: read the order, then commands until told to finish."""
    line, stop = open_line(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # schedulers send theirs to every process of a job
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        choose_deterministic_kernels()  # while the order is still on its way
        order = line.order()
        make_deterministic(seed=order.training.seed, threads=own_threads(order.threads))
        trainer = Trainer(order, line, stop, join(line, order))
        trainer.resume()
        while isinstance(command := line.next_command(), TrainUntil):
            trainer.train_segment(command.step)
        trainer.finish()
    except Exception as error:
        fall(line, error)
    # Interpreter shutdown of a torch process takes long and has nothing left to save.
    os._exit(0)


def step_record(result: StepResult, attempt: int) -> StepRecord:
    """Return a step's result as the record that is stored and sent."""
    return StepRecord(attempt=attempt, **asdict(result))


def _nothing() -> None:
    """What only rank 0 does."""


if __name__ == "__main__":
    main()
