"""The trainer process (`python -m tasks.trainer.trainer`): holds the tensors of one attempt, trains and stages.

Only the parent commits, so that work counts. It exits when its stdin ends; a launcher starts one for each rank.
"""

import faulthandler
import os
import platform
import signal
import threading
from functools import partial

import torch

from model.errors import NonFiniteLoss, TokenOutOfRange
from model.estimates.utilization import peak_flops, peak_source
from model.training.determinism import make_deterministic
from model.training.train_state import TrainState
from model.training.training_loop import StepObserver, StepResult, default_fetch_schedule, train_until
from storage.checkpoints.checkpoint import checkpoint_target
from storage.checkpoints.checkpoint_documents import TrainerDocument, small_tensor
from storage.logs.run_entries import DevicePeak
from storage.logs.run_log import run_prefix
from storage.stores.open_store import open_store
from tasks.trainer.fault_injection import IN_LOAD, FaultKind, FaultPlan, inject_process_fault
from tasks.trainer.flight_recorder import write_collectives_at
from tasks.trainer.staging import HostCheckpoint, SharedStaging, Staging, StagingCallbacks
from tasks.trainer.staging_buffer import StagingBuffer
from tasks.trainer.step_results import SpikeCheck, StepReporter, raise_for_samples
from tasks.trainer.tensor_exchange import to_group
from tasks.trainer.trainer_channel import Channel, Place, exit_on_error, open_channel
from tasks.trainer.trainer_group import STACKS_SIGNAL
from tasks.trainer.trainer_protocol import Ready, TrainerSpec, TrainUntil, Waiting
from tasks.trainer.training_setup import CheckpointLoad, fresh_state, open_training_data, restore_state


class Trainer:
    """One attempt's training: data, state, and the staging that overlaps it."""

    def __init__(self, spec: TrainerSpec, channel: Channel, stop: threading.Event, place: Place) -> None:
        """Open data and state; training stops after the step in which `stop` is set."""
        self._spec, self._channel, self._stop = spec, channel, stop
        self._ranks, self._store, prefix = place.ranks, open_store(spec.store_url), run_prefix(spec.run_id)
        self._reporter = StepReporter(spec, self._store, prefix, channel, place.ranks)
        self._load = CheckpointLoad(self._store, spec.resume)
        self._data = open_training_data(self._store, spec, place)
        self._state = fresh_state(spec, self._data, place)
        self._faults = FaultPlan(self._store, prefix, spec.faults, attempt=spec.attempt)
        self._spikes = SpikeCheck(spec.divergence, self._data.inputs.order)
        self._staging = self._open_staging(place)

    def _open_staging(self, place: Place) -> Staging:
        callbacks = StagingCallbacks(
            on_staged=self._channel.send,
            on_waiting=lambda step, why, seconds: self._channel.send(Waiting(step=step, why=why, seconds=seconds)),
            on_failed=partial(exit_on_error, self._channel),
        )
        shared = None
        if place.rendezvous is not None:
            shared = SharedStaging(place.ranks, place.rendezvous, self._state.live_tensors())
        buffer = StagingBuffer(place.device)
        return Staging(
            self._store, callbacks, patience_seconds=self._spec.patience_seconds, buffer=buffer, shared=shared
        )

    def resume(self) -> None:
        """Restore the state from the spec's checkpoint or initial weights, and report that training can begin."""
        for kind in self._faults.due(self._spec.attempt, IN_LOAD) if self._ranks.is_first else ():
            self._faults.pause(kind, self._spec.attempt, stopping=self._stop.is_set)
        digest = restore_state(self._state, self._spec, self._store, self._load)
        step, parameters = self._state.step, self._state.model.parameter_count
        device, precision = self._state.device, self._spec.training.precision
        peak = DevicePeak(flops=peak_flops(device, precision), source=peak_source(device, precision))
        ready = Ready(step=step, state_sha256=digest, parameters=parameters, device=str(device), peak=peak)
        self._channel.send(ready)

    def train_segment(self, until_step: int, stall_seconds: float | None = None) -> None:
        """Train, copy the state to the host, and stage it in the background while the next segment trains.

        With `stall_seconds` nothing is copied or staged if the checkpoint before is still on its way so much later.
        """
        self._staging.prepare(self._state.live_tensors())
        observer = StepObserver(
            on_step=self._on_step,
            stop_requested=lambda: self._ranks.any(self._stop.is_set()),
            probe=self._data.probe,
        )
        schedule = default_fetch_schedule(self._state, at_steps=self._faults.steps)
        try:
            stopped = train_until(self._state, self._data.inputs, observer, until_step=until_step, schedule=schedule)
        except (NonFiniteLoss, TokenOutOfRange) as error:
            raise_for_samples(error, self._state, self._data.inputs)
        if stall_seconds is not None and not stopped and self._ranks.any(not self._staging.wait(stall_seconds)):
            self._reporter.report_segment(step=self._state.step, stopped=False, behind=self._staging.step)
            return
        checkpoint = self._copy_checkpoint()
        self._reporter.report_segment(step=self._state.step, stopped=stopped)
        self._staging.begin(checkpoint, before=self._reporter.publish)

    def finish(self) -> None:
        """Stop reading ahead, and wait until every rank has staged its checkpoint."""
        assert self._data.inputs.loader is not None
        self._data.inputs.loader.close()
        self._staging.wait()
        self._ranks.any(False)

    def _copy_checkpoint(self) -> HostCheckpoint:
        tensors = self._staging.copy(self._state.live_tensors())
        document = TrainerDocument(
            version=1,
            step=self._state.step,
            cursor=self._state.cursor,
            learning_rate=self._reporter.learning_rate,
            versions={"python": platform.python_version(), "torch": str(torch.__version__)},
            tensors=tuple(small_tensor(record) for record in to_group("trainer", tensors).records),
        )
        target = checkpoint_target(self._spec.run_id, step=document.step, attempt=self._spec.attempt)
        return HostCheckpoint(target=target, tensors=tensors, document=document)

    def _on_step(self, result: StepResult) -> None:
        self._reporter.report(result)
        self._spikes.check(result)
        for kind in self._faults.due(result.step) if self._ranks.is_first else ():
            if kind is FaultKind.PAUSE:
                self._faults.pause(kind, result.step, stopping=self._stop.is_set)
            elif kind is FaultKind.SDC:
                flip_weight_bit(self._state)
            elif kind is FaultKind.OOM:
                torch.empty(1 << 60, dtype=torch.uint8)
            elif kind is FaultKind.BAD_DATA:
                self._data.corrupt_next_batch(self._state.step)
            else:
                inject_process_fault(kind)


def flip_weight_bit(state: TrainState, bit: int = 12) -> None:
    """Flip one bit of one weight in place, silently, for fault injection; bit 0 is the lowest of the mantissa."""
    weights = next(named.tensor for named in state.live_tensors() if named.group == "weights")
    words = getattr(weights, "to_local", lambda: weights)().view(torch.int32).view(-1)  # (n,)
    words[len(words) // 2] ^= 1 << bit


def main() -> None:
    """Serve one attempt: read the spec, then execute commands until `Finish`."""
    channel, stop = open_channel(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # schedulers signal every process of a job
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_collectives_at(STACKS_SIGNAL)
    # The stacks are written by the signal's own handler, whatever the interpreter waits for.
    faulthandler.register(STACKS_SIGNAL, chain=True)
    try:
        spec = channel.read_spec()
        make_deterministic(seed=spec.training.seed, threads=spec.threads)
        trainer = Trainer(spec, channel, stop, channel.join(spec))
        trainer.resume()
        while isinstance(command := channel.next_command(), TrainUntil):
            trainer.train_segment(command.step, command.stall_seconds)
        trainer.finish()
    except Exception as error:
        exit_on_error(channel, error)
    # The interpreter shutdown of a torch process is slow and has nothing left to save.
    os._exit(0)


if __name__ == "__main__":
    main()
