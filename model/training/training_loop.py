"""Trains up to a step and reports every step on the way, with held-out losses and sample texts."""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median_low
from time import perf_counter

import torch

from cairn.model.architectures.gpt import GPT
from cairn.model.architectures.own_network import Network
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data import token_windows
from cairn.model.errors import InvalidInput, NonFiniteLoss
from cairn.model.estimates.utilization import flops_per_token, peak_flops, read_memory_bytes
from cairn.model.inference import prediction
from cairn.model.training import training_step
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_step import DeferredStep, StepInputs, UpdateResult, sum_finite_losses, take_step

_PROBE_WINDOWS = 8
"""Held-out windows of one batch of the probe: the same for any micro-batch, so that the curve does not jump."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One completed step: `step` is 1-based, losses are in nats per token, `grad_norm` is before clipping.

    `tokens` counts from the first step (of a fork from that of the first run before it), `epoch` is how often the data
    was drawn by then, `data_seconds` what the step waited for its batch, `loss_scale` that of fp16. `weights_digest` is
    over the bits of all weights after the step, if this process has them all. `slowest_rank` of several worked by
    itself for longest; the median one for so long.
    """

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
    tokens: int
    epoch: float
    data_seconds: float
    loss_scale: float | None
    weights_digest: str | None
    slowest_rank: int | None
    slowest_rank_seconds: float | None
    median_rank_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Measures a fixed slice of held-out windows as often as `training` says, and samples text after `prompt_ids`."""

    windows: token_windows.TokenWindows
    training: TrainingConfig
    prompt_ids: Sequence[int]
    decode: Callable[[Sequence[int]], str]

    def is_due(self, step: int) -> bool:
        """Whether to measure after `step` completed steps."""
        return step % self.training.probe_every_steps == 0

    def measure(self, model: Network) -> tuple[float, str | None]:
        """Return loss in nats per token, and text unless its length is 0; mode and generators stay unchanged."""
        batches, new_tokens = self.training.probe_batches, self.training.sample_tokens
        loss, _ = prediction.held_out_loss(model, self.windows, batches=batches, batch_size=_PROBE_WINDOWS)
        if new_tokens == 0:
            return loss, None
        return loss, prediction.sample_text(model, self.prompt_ids, self.decode, new_tokens=new_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSchedule:
    """When the host fetches deferred metrics: after so many steps or seconds, and right after `at_steps`.

    Also before a probe and at the loop's end. No bit depends on it; `every_steps` 1 fetches a step before its update.
    """

    every_steps: int
    every_seconds: float = 1.0
    at_steps: Collection[int] = ()

    def is_due(self, step: int, *, pending: int, seconds: float) -> bool:
        """Whether to fetch after `step`, with `pending` steps launched, the oldest of them `seconds` ago."""
        return pending >= self.every_steps or seconds >= self.every_seconds or step in self.at_steps


FETCH_EVERY_STEP = FetchSchedule(every_steps=1)
DEFERRED_STEPS = 10
"""An accelerator waits while the host fetches; one wait in ten steps is not measurable."""


def default_fetch_schedule(state: TrainState, *, at_steps: Collection[int] = ()) -> FetchSchedule:
    """Defer metrics on an accelerator, fetch every step on a CPU, which has nothing to wait for.

    In fp16 the scaler decides after each step; several ranks use no clock, so that they raise one error together.
    """
    if state.device.type == "cpu" or state.scaler is not None:
        return FETCH_EVERY_STEP
    every_seconds = 1.0 if state.ranks.size == 1 else math.inf
    return FetchSchedule(every_steps=DEFERRED_STEPS, every_seconds=every_seconds, at_steps=at_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepObserver:
    """The loop calls `on_step` with each record in order, `stop_requested` after each step, `probe` when due."""

    on_step: Callable[[StepResult], None]
    stop_requested: Callable[[], bool]
    probe: Probe | None = None
    clock: Callable[[], float] = perf_counter


def train_until(
    state: TrainState,
    inputs: StepInputs,
    observer: StepObserver,
    *,
    until_step: int,
    schedule: FetchSchedule | None = None,
) -> bool:
    """Train `state` in place until `until_step` steps are complete or a stop is requested; return whether it was.

    `schedule` None means `default_fetch_schedule`. Deferred records arrive late, but all of them before anything is
    raised; steps fetched together share their time. The loader stays open.
    NonFiniteLoss and TokenOutOfRange leave the state as after the last completed step.
    """
    order, windows, training = inputs.order, inputs.windows, inputs.training
    if (covered := order.window_count) != windows.window_count:
        raise InvalidInput(f"order covers {covered} windows, the data has {windows.window_count}; must be equal")
    if training.mask_documents != (state.model.boundary_id is not None):
        problem = f"must agree with the network's boundary_id={state.model.boundary_id}"
        advice = "set it to the tokenizer's end-of-text id to mask, to None not to"
        raise InvalidInput(f"training.mask_documents={training.mask_documents} {problem}; {advice}")
    state.model.train()
    peak_flops(state.device, training.precision, state.workers.count)  # once per process, and not during a step
    schedule = default_fetch_schedule(state) if schedule is None else schedule
    if schedule.every_steps > 1 and state.scaler is None:
        return _train_deferred(state, inputs, observer, until_step, schedule)
    stopped = False
    while state.step < until_step and not stopped:
        started = observer.clock()
        result = take_step(state, inputs)
        _report(state, inputs, observer, state.step, result, observer.clock() - started)
        stopped = observer.stop_requested()
    return stopped


def _train_deferred(
    state: TrainState, inputs: StepInputs, observer: StepObserver, until_step: int, schedule: FetchSchedule
) -> bool:
    pending, stopped, probe = deque[DeferredStep](), False, observer.probe
    with training_step.UpdateGuard(state.optimizers, state.device) as guard:
        started = observer.clock()
        while state.step < until_step and not stopped:
            try:
                pending.append(training_step.launch_step(state, inputs, guard))
            except Exception:
                _fetch(state, inputs, observer, pending, started)  # if an earlier step was bad, its error is the cause
                raise
            seconds = observer.clock() - started
            is_probed = probe is not None and probe.is_due(state.step)
            if is_probed or schedule.is_due(state.step, pending=len(pending), seconds=seconds):
                _fetch(state, inputs, observer, pending, started)
                started = observer.clock()
            stopped = observer.stop_requested()
        _fetch(state, inputs, observer, pending, started)
    return stopped


def _fetch(
    state: TrainState, inputs: StepInputs, observer: StepObserver, pending: deque[DeferredStep], started: float
) -> None:
    """Wait for the pending steps and report them in order; a bad step resets the state to before it."""
    if not pending:
        return
    every = torch.cat([step.metrics for step in pending]).cpu()  # the one wait for the device
    seconds = (observer.clock() - started) / len(pending)
    for metrics in every.split([len(step.metrics) for step in pending]):
        step, numbers = pending.popleft(), metrics.tolist()
        losses, (grad_norm, *rank_seconds) = numbers[: len(step.parts)], numbers[len(step.parts) :]
        try:
            loss = sum_finite_losses(losses, step=step.step, windows=step.windows, parts=step.parts)
            training_step.require_finite_norm(grad_norm, step=step.step, windows=step.windows)
        except NonFiniteLoss:
            state.step = step.step - 1
            raise
        digest, own = training_step.format_weights_sum(step.weights_sum), tuple(rank_seconds)
        result = UpdateResult(loss=loss, lr=step.lr, grad_norm=grad_norm, weights_digest=digest, rank_seconds=own)
        _report(state, inputs, observer, step.step, result, seconds)


def _report(
    state: TrainState, inputs: StepInputs, observer: StepObserver, step: int, result: UpdateResult, seconds: float
) -> None:
    config, probe, before, seconds = state.model.config, observer.probe, state.before, max(seconds, 1e-9)
    tokens_per_second = state.global_batch * config.block_size / seconds
    count = 0 if isinstance(state.model, GPT) else state.model.parameter_count
    per_token = flops_per_token(config, vocab_size=state.model.vocab_size, frozen=bool(state.beside), parameters=count)
    model_flops = per_token * tokens_per_second
    probe_loss, sample = probe.measure(state.model) if probe is not None and probe.is_due(step) else (None, None)
    peak = peak_flops(state.device, inputs.training.precision, state.workers.count)
    own = result.rank_seconds
    slowest = max(range(len(own)), key=own.__getitem__, default=None)
    observer.on_step(
        StepResult(
            step=step,
            train_loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens_per_second=tokens_per_second,
            mfu=model_flops / (state.ranks.size * peak),
            memory_bytes=read_memory_bytes(state.device),
            seconds=seconds,
            probe_loss=probe_loss,
            sample=sample,
            tokens=before.tokens + (step - before.step) * state.global_batch * config.block_size,
            epoch=inputs.order.draws_before(step) / inputs.windows.window_count,
            data_seconds=inputs.loader.take_waited_seconds() if inputs.loader else 0.0,
            loss_scale=result.loss_scale,
            weights_digest=result.weights_digest,
            slowest_rank=None if slowest is None else state.ranks.position.members[slowest],
            slowest_rank_seconds=None if slowest is None else own[slowest],
            median_rank_seconds=median_low(own) if own else None,
        )
    )
