"""The trainer process (`python -m cairn.tasks.trainer.trainer`): holds the tensors of one attempt, trains and stages.

Only the parent commits, so that work counts. It exits when its stdin ends; a launcher starts one for each rank.
"""

import faulthandler
import math
import os
import platform
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from shutil import disk_usage
from typing import NoReturn

import psutil
import torch

from cairn.model.data.sample_order import SampleOrder
from cairn.model.errors import BadBatch, LossExploded, NonFiniteLoss, TokenOutOfRange
from cairn.model.estimates.utilization import peak_flops, peak_source
from cairn.model.training.determinism import make_deterministic
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_loop import StepObserver, StepResult, default_fetch_schedule, train_until
from cairn.model.training.training_step import BASELINE_STEPS, StepInputs, find_bad_windows, find_spike
from cairn.storage.checkpoints.checkpoint import checkpoint_target
from cairn.storage.checkpoints.payload import TrainerDocument, small_tensor
from cairn.storage.logs import log_entry, run_log, step_log
from cairn.storage.logs.run_members import MembersChanged
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.open_store import open_store
from cairn.tasks.attempt.injected_faults import IN_LOAD, FaultKind, FaultPlan, inject_process_fault
from cairn.tasks.configuration.network_module import module_versions
from cairn.tasks.configuration.settings import DivergenceConfig
from cairn.tasks.errors import TaskError
from cairn.tasks.machine.arithmetic import arithmetic_of
from cairn.tasks.policy.termination import TerminationReason
from cairn.tasks.trainer import staging, staging_buffer, tensor_exchange, trainer_group, training_setup
from cairn.tasks.trainer.trainer_channel import Channel, Place, exit_on_error, open_channel
from cairn.tasks.trainer.trainer_protocol import Ready, SegmentDone, StepDone, TrainerSpec, TrainUntil

_MEASURE_SECONDS = 1.0
_GO_ON, _MIXED = "go-on", "+"
_ADMIT, _STOP = 1, 2
"""The wishes of ranks between two steps, of which the largest is carried out."""


class StepReporter:
    """Counts the steps of one attempt; only rank 0 stores and sends their records."""

    def __init__(self, spec: TrainerSpec, store: ObjectStore, run_prefix: str, channel: Channel, place: Place) -> None:
        """Open the step log; GPU-seconds count from now."""
        self._attempt, self._channel, self._devices = spec.attempt, channel, spec.devices
        self._ranks, self._rendezvous = place.ranks, place.rendezvous
        self._step_tokens = spec.training.global_batch * spec.model.block_size
        self._log = step_log.StepLog(store, run_prefix, spec.attempt, spec.claim_id, spool_dir=spec.work_dir)
        self._started, self._tokens, self.learning_rate = time.monotonic(), 0, 0.0
        self._measure_at, self._members = 0.0, place.ranks.members

    def report(self, result: StepResult) -> None:
        """Count a step; store and send its record, after which ranks make it if these have changed."""
        self._report_members(result.step)
        self.learning_rate = result.lr
        self._tokens += self._step_tokens
        if self._ranks.is_first:
            fields = asdict(result) | {"grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None}
            fields |= self._measure_machine()
            record = step_log.StepRecord(
                **fields, attempt=self._attempt, at=log_entry.utc_now(), world_size=self._ranks.size
            )
            self._log.write(record)
            self._channel.send(StepDone(record=record, tokens=self._tokens, gpu_seconds=self._gpu_seconds()))

    def report_segment(self, *, step: int, stopped: bool, behind: int | None = None) -> None:
        """Send that a segment has ended; without a checkpoint where that of step `behind` is still on its way."""
        self._report_members(step + 1)
        used = self._gpu_seconds()
        done = SegmentDone(step=step, stopped=stopped, tokens=self._tokens, gpu_seconds=used, behind=behind)
        self._channel.send(done)

    def _report_members(self, step: int) -> None:
        members, before = self._ranks.members, self._members
        if members == before or not self._ranks.is_first:
            return
        self._members = members
        lost = tuple(rank for rank in before if rank not in members)
        joined = tuple(rank for rank in members if rank not in before)
        hosts = [self._rendezvous.get(f"host/{rank}").decode() for rank in joined] if self._rendezvous else []
        said = [f"{_named(lost)} lost"] if lost else []
        said += [f"{_named(joined)} joined with the others' state ({', '.join(sorted(set(hosts)))})"] if joined else []
        detail = f"{' and '.join(said)} after step {step - 1}; {', '.join(map(str, members))} go on with the same bits"
        change = MembersChanged(
            attempt=self._attempt,
            step=step,
            lost=lost,
            joined=joined,
            hosts=tuple(hosts),
            remaining=members,
            detail=detail,
            charged=TerminationReason.LOST if lost else None,
        )
        self._channel.send(change)

    def publish(self) -> None:
        """Upload the records, if the store is not a local folder."""
        if self._ranks.is_first:
            self._log.publish()

    def _measure_machine(self) -> dict[str, int]:
        with suppress(OSError):
            if time.monotonic() >= self._measure_at:  # a disk may be far away
                self._measure_at = time.monotonic() + _MEASURE_SECONDS
                free = disk_usage(self._log.path.parent).free
                return {"rss_bytes": psutil.Process().memory_info().rss, "disk_free_bytes": free}
        return {}

    def _gpu_seconds(self) -> float:
        return (time.monotonic() - self._started) * self._devices


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class SpikeCheck:
    """The recent losses of an attempt, and the rule for when they have exploded."""

    def __init__(self, rule: DivergenceConfig, order: SampleOrder) -> None:
        """Start without losses; `order` names the windows of a step."""
        self._rule, self._order = rule, order
        self._losses: deque[float] = deque(maxlen=BASELINE_STEPS + rule.patience_steps)

    def check(self, result: StepResult) -> None:
        """Add a step's loss; raises LossExploded with the spike's steps and windows."""
        self._losses.append(result.train_loss)
        spike = find_spike(list(self._losses), patience=self._rule.patience_steps, rise=self._rule.rise_nats)
        if spike is None:
            return
        (level, baseline), last = spike, result.step
        first = last - self._rule.patience_steps + 1
        windows = [window for step in range(first, last + 1) for window in self._order.windows_of(step - 1)]
        raise LossExploded(step=last, spike_step=first, level=level, baseline=baseline, windows=windows)


def raise_for_samples(error: NonFiniteLoss | TokenOutOfRange, state: TrainState, inputs: StepInputs) -> NoReturn:
    """Raise BadBatch with the samples to blame, or NonFiniteLoss if all samples fail: then the weights are to blame."""
    step, drawn = state.step + 1, inputs.order.windows_of(state.step)
    bad = find_bad_windows(state, inputs.windows, drawn, training=inputs.training)
    if isinstance(error, TokenOutOfRange):
        raise BadBatch(step=step, windows=bad, why="token ids outside the vocabulary") from error
    if 0 < len(bad) < len(set(drawn.tolist())):
        raise BadBatch(step=step, windows=bad, why=f"{error.quantity} is {error.value}") from error
    raise NonFiniteLoss(step=step, quantity=error.quantity, value=error.value, windows=drawn.tolist()) from error


class Trainer:
    """One attempt's training: data, state, and the staging that overlaps it."""

    def __init__(self, spec: TrainerSpec, channel: Channel, stop: threading.Event, place: Place) -> None:
        """Open data and state; training stops after the step in which `stop` is set."""
        self._spec, self._channel, self._stop = spec, channel, stop
        self._ranks, self._store, prefix = place.ranks, open_store(spec.store_url), run_log.run_prefix(spec.run_id)
        self._reporter = StepReporter(spec, self._store, prefix, channel, place)
        self._load = training_setup.CheckpointLoad(self._store, spec.resume if place.ranks.has_state else None)
        self._data = training_setup.open_training_data(self._store, spec, place)
        self._state = training_setup.fresh_state(self._store, spec, self._data, place)
        self._faults = FaultPlan(self._store, prefix, spec.faults, attempt=spec.attempt)
        self._spikes = SpikeCheck(spec.divergence, self._data.inputs.order)
        self._rendezvous, self._joins = place.rendezvous, not place.ranks.has_state
        shared, buffer = None, staging_buffer.StagingBuffer(place.device)
        if place.rendezvous is not None:
            shared = staging.SharedStaging(place.ranks, place.rendezvous, self._state.live_tensors())
        on_failed, patience = partial(exit_on_error, channel), spec.patience_seconds
        self._staging = staging.Staging(
            self._store, channel.send, on_failed, patience_seconds=patience, buffer=buffer, shared=shared
        )

    def resume(self) -> None:
        """Restore the state from the spec's checkpoint or initial weights, and report that training can begin.

        A rank that joins others waits for them and takes over the state of rank 0, within the command under way.
        """
        if self._joins:
            assert self._rendezvous is not None
            self._require_arithmetic(self._rendezvous.get(_GO_ON).decode())
            self._rendezvous.put(f"host/{self._ranks.own}", socket.gethostname().encode())
            if self._state.beside:
                self._load.beside(self._state, self._spec.initial_weights_sha256)
            self._ranks.join(self._hand_over, self._state.bits_sum)
            return
        for kind in self._faults.due(self._spec.attempt, IN_LOAD) if self._ranks.is_first else ():
            self._faults.pause(kind, self._spec.attempt, stopping=self._stop.is_set)
        digest = self._load.into(self._state, self._spec.initial_weights_sha256)
        step, parameters = self._state.step, self._state.model.parameter_count
        device, precision = self._state.device, self._spec.training.precision
        flops = peak_flops(device, precision, self._state.workers.count)
        peak = log_entry.DevicePeak(flops=flops, source=peak_source(device, precision))
        arithmetic = self._ranks_agree(arithmetic_of(str(device), self._spec.training.arithmetic))
        ready = Ready(
            step=step, state_sha256=digest, parameters=parameters, device=str(device), peak=peak, arithmetic=arithmetic
        )
        if self._rendezvous is not None and self._ranks.place is not None and self._ranks.is_first:
            self._rendezvous.put(_GO_ON, arithmetic.digest.encode())
        self._channel.send(ready)

    def _require_arithmetic(self, digest: str) -> None:
        """Raise TaskError if this process computes other bits than the ranks that it joins, which all agree."""
        own = arithmetic_of(str(self._state.device), self._spec.training.arithmetic)
        if digest != own.digest and not digest.endswith(_MIXED):
            raise TaskError(f"this machine computes other bits ({own}) than those that train: it does not join")

    def _hand_over(self) -> None:
        """Give the state, and the number of the command under way, to the ranks that join; such a rank takes both."""
        assert self._rendezvous is not None
        live, is_newcomer = self._state.live_tensors(), not self._ranks.has_state
        commands = torch.tensor([self._rendezvous.commands - 1])
        self._ranks.hand_over([*(named.tensor for named in live), commands])
        if is_newcomer:
            self._state.load_trainer({named.name: named.tensor for named in live})
            self._rendezvous.commands = int(commands)

    def _is_to_stop(self) -> bool:
        """Ask all ranks between two steps whether one of them is to stop; let in those who wait, if not."""
        wish = _STOP if self._stop.is_set() else _ADMIT if self._ranks.is_waited_for() else 0
        answer = self._ranks.largest(wish)
        if answer == _ADMIT:
            self._ranks.admit(self._hand_over, self._state.bits_sum)
        return answer == _STOP

    def _ranks_agree(self, own: log_entry.Arithmetic) -> log_entry.Arithmetic:
        """Return the first rank's arithmetic, with a flag if another rank has another: bits depend on who has which."""
        first = torch.tensor(int(own.digest, 16))  # ()
        self._ranks.broadcast(first, source=0)
        if not self._ranks.any(int(first) != int(own.digest, 16)):
            return own
        return replace(own, digest=f"{own.digest}{_MIXED}", flags=f"{own.flags}, not the same in every process")

    def train_segment(self, until_step: int, stall_seconds: float | None = None) -> None:
        """Train, copy the state to the host, and stage it in the background while the next segment trains.

        With `stall_seconds` nothing is copied or staged if the checkpoint before is still on its way so much later.
        """
        if not self._joins:  # so that a rank that was lost is known to all before a checkpoint is shared
            self._ranks.any(False)
        self._joins = False  # a rank that has just joined is within its first segment
        self._staging.prepare(self._state.live_tensors())
        observer = StepObserver(on_step=self._on_step, stop_requested=self._is_to_stop, probe=self._data.probe)
        schedule = default_fetch_schedule(self._state, at_steps=self._faults.steps)
        try:
            stopped = train_until(self._state, self._data.inputs, observer, until_step=until_step, schedule=schedule)
        except (NonFiniteLoss, TokenOutOfRange) as error:
            raise_for_samples(error, self._state, self._data.inputs)
        if stall_seconds is not None and not stopped and self._ranks.any(not self._staging.wait(stall_seconds)):
            self._reporter.report_segment(step=self._state.step, stopped=False, behind=self._staging.step)
            return
        tensors = self._staging.copy(self._state.live_tensors())
        step, cursor, rate = self._state.step, self._state.cursor, self._reporter.learning_rate
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        versions |= module_versions(self._spec.model)
        small = tuple(map(small_tensor, tensor_exchange.to_group("trainer", tensors).records))
        document = TrainerDocument(
            version=1, step=step, cursor=cursor, learning_rate=rate, versions=versions, tensors=small
        )
        target = checkpoint_target(self._spec.run_id, step=document.step, attempt=self._spec.attempt)
        self._reporter.report_segment(step=document.step, stopped=stopped)
        checkpoint = staging.HostCheckpoint(target=target, tensors=tensors, document=document)
        self._staging.begin(checkpoint, before=self._reporter.publish)

    def finish(self) -> None:
        """Stop reading ahead, and wait until the checkpoint is staged."""
        assert self._data.inputs.loader is not None
        self._data.inputs.loader.close()
        self._staging.wait()
        if self._ranks.place is None:  # others may be lost, and rank 0 waits for what they write
            self._ranks.any(False)

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
                self._data = self._data.damage_next_batch(self._state.step, self._spec.work_dir)
            else:
                inject_process_fault(kind)


def flip_weight_bit(state: TrainState) -> None:
    """Flip one bit of one weight's mantissa in place, silently, for fault injection."""
    weights = next(named.tensor for named in state.live_tensors() if named.group == "weights")
    words = getattr(weights, "to_local", lambda: weights)().view(torch.int32).view(-1)  # (n,)
    words[len(words) // 2] ^= 1 << 12


def main() -> None:
    """Serve one attempt: read the spec, then execute commands until `Finish`."""
    channel, stop = open_channel(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # schedulers signal every process of a job
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The stacks are written by the signal's own handler, whatever the interpreter waits for.
    faulthandler.register(trainer_group.STACKS_SIGNAL)
    try:
        spec = channel.read_spec()
        make_deterministic(seed=spec.training.seed, threads=spec.threads, arithmetic=spec.training.arithmetic)
        trainer = Trainer(spec, channel, stop, channel.join(spec))
        trainer.resume()
        while isinstance(command := channel.next_command(), TrainUntil):
            trainer.train_segment(command.step, command.stall_seconds)
        trainer.finish()
    except (Exception, SystemExit) as error:  # a network's own code must not end a rank as if all were done
        exit_on_error(channel, error)
    # The interpreter shutdown of a torch process is slow and has nothing left to save.
    os._exit(0)


if __name__ == "__main__":
    main()
