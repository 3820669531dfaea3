"""Training up to a step, with a record of every step on the way.

Owns the loop, its records and when losses are read. Refuses to know segments, checkpoints, files and signals: it is
told where to stop, asks whether to stop earlier, and reports to a function.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from model.configuration.training import TrainingConfig
from model.data.batch_loader import BatchLoader
from model.data.sample_order import SampleOrder
from model.data.token_windows import TokenWindows
from model.errors import InvalidInput, NonFiniteLoss
from model.estimates.utilization import flops_per_token, measured_peak_flops, memory_bytes, model_flops_utilization
from model.training.deferred_metrics import DeferredStep, UpdateGuard, UpdateResult, fetch_metrics, update_result
from model.training.probe import Probe
from model.training.train_state import TrainState
from model.training.training_step import launch_step, take_step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One completed step: `step` is 1-based, losses in nats per token, `grad_norm` before clipping."""

    step: int
    train_loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    mfu: float
    memory_bytes: int
    seconds: float
    probe_loss: float | None
    sample: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """When the host reads what steps have measured: after so many steps or seconds, and at once after those `at`.

    Whatever it says, nothing is left unread when the loop returns, raises or measures a probe, and no bit depends on
    it. `every_steps` 1 reads each step before its update.
    """

    every_steps: int
    every_seconds: float = 1.0
    at: Collection[int] = ()

    def __post_init__(self) -> None:
        """Refuse a reading that never comes."""
        if self.every_steps < 1:
            raise InvalidInput(f"every_steps={self.every_steps} must be at least 1, which reads every step at once")

    def is_due(self, step: int, *, unread: int, seconds: float) -> bool:
        """Whether to read after `step`, with so many steps unread, the oldest of them begun so many seconds ago."""
        return unread >= self.every_steps or seconds >= self.every_seconds or step in self.at


AT_ONCE = Reading(every_steps=1)
LATE_STEPS = 10
"""An accelerator stands still while the host reads; of ten steps, one wait is not to be noticed."""


def usual_reading(state: TrainState, *, at: Collection[int] = ()) -> Reading:
    """Read late on an accelerator, but at once after the steps `at`; each step on a CPU, which has nothing to wait for.

    In fp16 the scaler's own decision has to be read each step. Several ranks must read after the same steps, to raise
    the same error in the same place: no clock decides there.
    """
    if state.device.type == "cpu" or state.scaler is not None:
        return AT_ONCE
    return Reading(every_steps=LATE_STEPS, every_seconds=1.0 if state.ranks.size == 1 else math.inf, at=at)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopOutcome:
    """Where the loop ended: completed steps, and whether it was asked to stop."""

    step: int
    stopped: bool


def train_until(
    state: TrainState,
    windows: TokenWindows,
    order: SampleOrder,
    *,
    until_step: int,
    training: TrainingConfig,
    micro_batch: int,
    on_step: Callable[[StepResult], None],
    stop_requested: Callable[[], bool],
    probe: Probe | None,
    loader: BatchLoader | None = None,
    reading: Reading | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoopOutcome:
    """Train `state` in place until `until_step` steps are complete or a stop is requested (asked after each step).

    A `loader` over the same windows and order reads batches ahead, and may serve many calls: it is left open.
    `reading` says when losses are read, `usual_reading` if it is None: records may come late, but all of them, in
    order, and before anything is raised. Steps read together share their time.
    Raises NonFiniteLoss and TokenOutOfRange with the state as it was after the last completed step.
    """
    _check(state, windows, order, until_step=until_step, training=training)
    if loader is not None and not (loader.windows is windows and loader.order == order):
        raise InvalidInput("the loader reads other windows or another order; make it from those that are trained on")
    state.model.train()
    course = _Course(state, windows, order, training, micro_batch, loader, probe, on_step, stop_requested, clock)
    measured_peak_flops(state.device, training.precision)  # once per process, and not during a step
    reading = usual_reading(state) if reading is None else reading
    if reading.every_steps == 1 or state.scaler is not None:
        return _train_at_once(course, until_step)
    with UpdateGuard(state.optimizer, state.device) as guard:
        return _train_late(course, until_step, reading, guard)


@dataclass(frozen=True, slots=True)
class _Course:
    """What stays the same from step to step."""

    state: TrainState
    windows: TokenWindows
    order: SampleOrder
    training: TrainingConfig
    micro_batch: int
    loader: BatchLoader | None
    probe: Probe | None
    on_step: Callable[[StepResult], None]
    stop_requested: Callable[[], bool]
    clock: Callable[[], float]


def _train_at_once(course: _Course, until_step: int) -> LoopOutcome:
    state = course.state
    while state.step < until_step:
        started = course.clock()
        result = take_step(
            state,
            course.windows,
            course.order,
            training=course.training,
            micro_batch=course.micro_batch,
            loader=course.loader,
        )
        _deliver(course, state.step, result, course.clock() - started)
        if course.stop_requested():
            return LoopOutcome(step=state.step, stopped=True)
    return LoopOutcome(step=state.step, stopped=False)


def _train_late(course: _Course, until_step: int, reading: Reading, guard: UpdateGuard) -> LoopOutcome:
    state, unread, stopped = course.state, deque[DeferredStep](), False
    started = course.clock()
    while state.step < until_step and not stopped:
        try:
            step = launch_step(
                state,
                course.windows,
                course.order,
                training=course.training,
                micro_batch=course.micro_batch,
                guard=guard,
                loader=course.loader,
            )
        except Exception:
            _read(course, unread, started)  # a step before this one may be bad: then that is what went wrong
            raise
        unread.append(step)
        seconds = course.clock() - started
        if reading.is_due(state.step, unread=len(unread), seconds=seconds) or _probe_is_due(course):
            _read(course, unread, started)
            started = course.clock()
        stopped = course.stop_requested()
    _read(course, unread, started)
    return LoopOutcome(step=state.step, stopped=stopped)


def _read(course: _Course, unread: deque[DeferredStep], started: float) -> None:
    """Wait for the unread steps and report them in order; at a bad one the state goes back to before it."""
    if not unread:
        return
    numbers = fetch_metrics(unread)
    seconds = (course.clock() - started) / len(unread)
    for measured in numbers:
        step = unread.popleft()
        try:
            result = update_result(step, measured)
        except NonFiniteLoss:
            course.state.step = step.step - 1
            course.state.generators.go_back_to(step.generators)
            raise
        _deliver(course, step.step, result, seconds)


def _probe_is_due(course: _Course) -> bool:
    return course.probe is not None and course.probe.is_due(course.state.step)


def _deliver(course: _Course, step: int, result: UpdateResult, seconds: float) -> None:
    state, probe, seconds = course.state, course.probe, max(seconds, 1e-9)
    config = state.model.config
    tokens_per_second = state.global_batch * config.block_size / seconds
    measured = probe.measure(state.model) if probe is not None and probe.is_due(step) else None
    record = StepResult(
        step=step,
        train_loss=result.loss,
        lr=result.lr,
        grad_norm=result.grad_norm,
        tokens_per_second=tokens_per_second,
        mfu=model_flops_utilization(
            flops_each_token=flops_per_token(config, state.model.parameter_count),
            tokens_per_second=tokens_per_second,
            peak_flops=measured_peak_flops(state.device, course.training.precision),
        ),
        memory_bytes=memory_bytes(state.device),
        seconds=seconds,
        probe_loss=None if measured is None else measured.loss,
        sample=None if measured is None else measured.sample,
    )
    course.on_step(record)


def _check(
    state: TrainState, windows: TokenWindows, order: SampleOrder, *, until_step: int, training: TrainingConfig
) -> None:
    if until_step > training.steps:
        raise InvalidInput(f"until_step={until_step} must be at most training.steps={training.steps}")
    if order.window_count != windows.window_count:
        raise InvalidInput(
            f"order covers {order.window_count} windows, the data has {windows.window_count}; must be equal"
        )
    if training.mask_documents != (state.model.boundary_id is not None):
        raise InvalidInput(
            f"training.mask_documents={training.mask_documents} must agree with the network's "
            f"boundary_id={state.model.boundary_id}; set it to the tokenizer's end-of-text id to mask, to None not to"
        )
    if order.global_batch != state.global_batch:
        raise InvalidInput(f"order draws {order.global_batch} samples, the state {state.global_batch}; must be equal")
    if windows.block_size > state.model.config.block_size or windows.vocab_size > state.model.vocab_size:
        raise InvalidInput(
            f"windows of block_size={windows.block_size}, vocab_size={windows.vocab_size} must fit the model's "
            f"{state.model.config.block_size} and {state.model.vocab_size}"
        )
