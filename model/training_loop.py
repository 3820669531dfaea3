"""Training up to a step, with a record of every step on the way.

Owns the loop and its records. Refuses to know segments, checkpoints, files and signals: it is told where to stop, asks
whether to stop earlier, and reports to a function.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from model.batch_loader import BatchLoader
from model.configuration import TrainingConfig
from model.errors import InvalidInput
from model.probe import Probe
from model.sample_order import SampleOrder
from model.token_windows import TokenWindows
from model.train_state import TrainState
from model.training_step import StepResult, take_step
from model.utilization import flops_per_token, measured_peak_flops, memory_bytes, model_flops_utilization


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
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
    on_step: Callable[[StepRecord], None],
    stop_requested: Callable[[], bool],
    probe: Probe | None,
    loader: BatchLoader | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoopOutcome:
    """Train `state` in place until `until_step` steps are complete or a stop is requested (asked after each step).

    A `loader` over the same windows and order reads batches ahead, and may serve many calls: it is left open.
    Raises NonFiniteLoss and TokenOutOfRange with the state as it was after the last completed step.
    """
    _check(state, windows, order, until_step=until_step, training=training)
    if loader is not None and not (loader.windows is windows and loader.order == order):
        raise InvalidInput("the loader reads other windows or another order; make it from those that are trained on")
    state.model.train()
    while state.step < until_step:
        started = clock()
        result = take_step(state, windows, order, training=training, micro_batch=micro_batch, loader=loader)
        seconds = max(clock() - started, 1e-9)
        on_step(_record(state, result, training=training, seconds=seconds, probe=probe))
        if stop_requested():
            return LoopOutcome(step=state.step, stopped=True)
    return LoopOutcome(step=state.step, stopped=False)


def _record(
    state: TrainState, result: StepResult, *, training: TrainingConfig, seconds: float, probe: Probe | None
) -> StepRecord:
    config = state.model.config
    tokens_per_second = state.global_batch * config.block_size / seconds
    measured = probe.measure(state.model) if probe is not None and probe.is_due(state.step) else None
    return StepRecord(
        step=state.step,
        train_loss=result.loss,
        lr=result.lr,
        grad_norm=result.grad_norm,
        tokens_per_second=tokens_per_second,
        mfu=model_flops_utilization(
            flops_each_token=flops_per_token(config, state.model.parameter_count),
            tokens_per_second=tokens_per_second,
            peak_flops=measured_peak_flops(state.device, training.precision),
        ),
        memory_bytes=memory_bytes(state.device),
        seconds=seconds,
        probe_loss=None if measured is None else measured.loss,
        sample=None if measured is None else measured.sample,
    )


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
