"""One optimizer step: accumulate gradients over micro-batches, check, clip, update.

Fetching each loss immediately makes an accelerator idle between two steps, so a step can leave its metrics there.
Source: the `found_inf` flag of PyTorch's fused optimizers, set by its GradScaler.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.model.architectures.own_network import Network, OwnNetwork
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data import batch_loader, sample_order, token_windows
from cairn.model.errors import NonFiniteLoss, TokenOutOfRange
from cairn.model.kernels.attention import document_starts, takes_starts
from cairn.model.kernels.head_loss import as_ids, head_loss, token_loss
from cairn.model.training import determinism, sharded_tensors
from cairn.model.training.membership import SharesChanged
from cairn.model.training.optimizer import set_rate, update_weights
from cairn.model.training.train_state import AUTOCAST_DTYPES, TrainState

BASELINE_STEPS = 64
"""Losses whose median a spike stands above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """Inputs of every step; `micro_batch` in windows. A `loader` of the same windows prefetches and changes no bit."""

    windows: token_windows.TokenWindows
    order: sample_order.SampleOrder
    training: TrainingConfig
    micro_batch: int
    loader: batch_loader.BatchLoader | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """A step's mean loss in nats per token, lr, gradient norm before clipping, loss scale; digest None if sharded.

    `rank_seconds` are what each rank worked by itself, on a GPU in an earlier step; empty where that is not known.
    """

    loss: float
    lr: float
    grad_norm: float
    loss_scale: float | None = None
    weights_digest: str | None = None
    rank_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeferredStep:
    """A launched step (1-based) whose metrics are still on its device.

    `metrics` are, all fp32 and joined: the losses of the micro-batches, which sum to the batch's mean loss in nats, the
    gradient norm, and the `rank_seconds` of `UpdateResult`. `weights_sum` is that of the state after the step,
    `windows` are the whole batch, `parts` the rows of each micro-batch.
    """

    step: int
    lr: float
    metrics: Tensor
    weights_sum: Tensor | None
    windows: tuple[int, ...]
    parts: tuple[slice, ...]


class UpdateGuard:
    """A flag on the device that the first non-finite number sets and nothing clears.

    While it is set inside the `with` block, no update changes the state: it stays that of the last finite step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._optimizers = optimizers
        self._flag = torch.zeros((), dtype=torch.float32, device=device)

    def check(self, losses: Tensor, grad_norm: Tensor) -> None:
        """Set the flag if one of `losses` (micro-batches,) or `grad_norm` is not finite; the host does not wait."""
        finite = losses.isfinite().all() & grad_norm.isfinite()
        self._flag.masked_fill_(~finite, 1.0)

    def __enter__(self) -> Self:
        for optimizer in self._optimizers:
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        return self

    def __exit__(self, *error: object) -> None:
        for optimizer in self._optimizers:
            del optimizer.found_inf  # type: ignore[attr-defined]


def take_step(state: TrainState, inputs: StepInputs) -> UpdateResult:
    """Advance `state` by one step.

    A non-finite loss or gradient raises NonFiniteLoss first; in fp16 the scaler skips a non-finite update instead.
    """
    rate = set_rate(state.optimizers, state.step + 1, inputs.training)
    batch, losses, rank_seconds = _accumulate_with_those_left(state, inputs)
    parts = state.ranks.all_micro_batches(state.global_batch, inputs.micro_batch)
    loss = sum_finite_losses(losses.tolist(), step=state.step + 1, windows=batch.windows, parts=parts)
    grad_norm = float(_clip(state, limit=inputs.training.grad_clip))
    if state.scaler is None:
        require_finite_norm(grad_norm, step=state.step + 1, windows=batch.windows)
    scale = None if state.scaler is None else state.scaler.get_scale()
    _update(state)
    digest, seconds = format_weights_sum(state.weights_sum()), tuple(rank_seconds.tolist())
    return UpdateResult(
        loss=loss, lr=rate, grad_norm=grad_norm, loss_scale=scale, weights_digest=digest, rank_seconds=seconds
    )


def launch_step(state: TrainState, inputs: StepInputs, guard: UpdateGuard) -> DeferredStep:
    """Advance `state` as `take_step` does, but leave the metrics on the device, without waiting for it.

    The bits are `take_step`'s until a number is not finite: then `guard` blocks updates, and the caller resets `state`.
    """
    rate = set_rate(state.optimizers, state.step + 1, inputs.training)
    batch, losses, rank_seconds = _accumulate(state, inputs)
    grad_norm = _clip(state, limit=inputs.training.grad_clip)
    guard.check(losses, grad_norm)
    _update(state)
    metrics = torch.cat((losses, grad_norm.reshape(1), rank_seconds))  # () -> (1,)
    weights, parts = state.weights_sum(), state.ranks.all_micro_batches(state.global_batch, inputs.micro_batch)
    return DeferredStep(
        step=state.step, lr=rate, metrics=metrics, weights_sum=weights, windows=batch.windows, parts=parts
    )


def format_weights_sum(weights_sum: Tensor | None) -> str | None:
    """Return the sum as 16 hex digits."""
    return None if weights_sum is None else f"{int(weights_sum) % 2**64:016x}"


def sum_finite_losses(losses: Sequence[float], *, step: int, windows: Sequence[int], parts: Sequence[slice]) -> float:
    """Return the sum of the micro-batches' losses; NonFiniteLoss names the windows of the first non-finite one."""
    for value, part in zip(losses, parts, strict=True):
        if not math.isfinite(value):
            raise NonFiniteLoss(step=step, quantity="loss", value=value, windows=windows[part])
    return math.fsum(losses)


def require_finite_norm(grad_norm: float, *, step: int, windows: Sequence[int]) -> None:
    """Raise NonFiniteLoss with the windows of the whole batch if the gradient norm is not finite."""
    if not math.isfinite(grad_norm):
        raise NonFiniteLoss(step=step, quantity="grad_norm", value=grad_norm, windows=windows)


def _gather(state: TrainState, inputs: StepInputs) -> batch_loader.Batch:
    """Gather this rank's rows, with the windows of all; an invalid token in any row raises TokenOutOfRange on all."""
    ranks, order, batch, failed = state.ranks, inputs.order, None, False
    rows = ranks.rows(order.global_batch, inputs.micro_batch)
    try:
        with state.own_time.reading():
            if inputs.loader is None:
                batch = batch_loader.gather_batch(inputs.windows, order.windows_of(state.step), rows=rows)
            else:
                batch = inputs.loader.batch(state.step, rows)
    except TokenOutOfRange:
        if ranks.size == 1:
            raise
        failed = True
    if ranks.any_in_step(failed):
        windows = inputs.windows if inputs.loader is None else inputs.loader.windows
        batch_loader.gather_batch(windows, order.windows_of(state.step))
    assert batch is not None
    return batch


def _accumulate_with_those_left(state: TrainState, inputs: StepInputs) -> tuple[batch_loader.Batch, Tensor, Tensor]:
    """Accumulate; when ranks are lost before the sum is complete, abandon it and begin again with those left."""
    while True:
        try:
            return _accumulate(state, inputs)
        except SharesChanged:
            continue


def _accumulate(state: TrainState, inputs: StepInputs) -> tuple[batch_loader.Batch, Tensor, Tensor]:
    """Leave the gradient of the next batch's mean loss in the parameters; return it and what `gather_losses` does."""
    batch = _gather(state, inputs)
    state.model.zero_grad(set_to_none=True)
    ranks, parameters = state.ranks, list(state.model.parameters())
    shares = ranks.shares(state.global_batch, inputs.micro_batch)
    parts, counts = shares[ranks.rank], [len(share) for share in shares]
    losses = [torch.empty(0)] * len(parts)
    backward = partial(_backward, state, inputs, batch, losses)
    with determinism.keeping_generators(state.device), state.own_time.computing():
        if ranks.is_sharded:  # each rank's gradients come unsharded until the last part has summed them up
            for number in range(len(parts)):
                backward(state.model, number)
        else:
            state.workers.accumulate(state.model, backward, len(parts))
    ranks.add_up(parameters, counts)
    return batch, *ranks.gather_losses(torch.stack(losses), state.own_time.seconds, counts)


def _backward(
    state: TrainState, inputs: StepInputs, batch: batch_loader.Batch, losses: list[Tensor], model: Network, number: int
) -> None:
    """Run one of this rank's micro-batches forward and backward, and keep its share of the batch's loss."""
    ranks, training = state.ranks, inputs.training
    parts = ranks.micro_batches(state.global_batch, inputs.micro_batch)
    part, first_row = parts[number], parts[0].start
    tokens, is_empty = batch.tokens[part.start - first_row : part.stop - first_row], part.start == part.stop  # (b, T+1)
    if is_empty:  # another rank has one row more, and all of them take part in its exchanges
        tokens = tokens.new_zeros(1, tokens.shape[1])  # (0, T+1) -> (1, T+1), of no weight
    if state.model.config.draws_numbers:
        index = part.start // inputs.micro_batch if not ranks.is_sharded else ranks.rank * len(parts) + number
        determinism.seed_generators(determinism.dropout_seed(training.seed, state.step + 1, index), state.device)
    ranks.synchronize(is_last=number == len(parts) - 1)
    mean = mean_loss(state, tokens, training, model)
    # The last part may be smaller: weighting by samples makes the sum the mean over the whole batch, and over answers
    # the batch's targets for those of them that count.
    every = state.global_batch * (tokens.shape[1] - 1)
    loss = mean * ((part.stop - part.start) / state.global_batch * (every / max(1, batch.targets)))
    losses[number] = torch.zeros_like(loss) if is_empty else loss.detach()
    summed = loss * ranks.size if ranks.is_sharded else loss  # sharding averages over the ranks
    (summed if state.scaler is None else state.scaler.scale(summed)).backward()


def mean_loss(state: TrainState, tokens: Tensor, training: TrainingConfig, model: Network | None = None) -> Tensor:
    """Return the mean cross-entropy in nats in the run's numerics, ready for backward: host ids (B, T+1) -> scalar.

    A target that does not count (below 0, see `TokenWindows`) adds 0 to the mean. A worker's `model` stands for the
    state's own.
    """
    network = state.network if model in (None, state.model) else model
    model = model or state.model
    dtype, boundary_id, starts = AUTOCAST_DTYPES.get(training.precision), state.model.boundary_id, None
    # Compiled layers have one shape, and the number of documents is another in every batch.
    is_compiled, head_size = training.compile, state.model.config.head_size
    if boundary_id is not None and not is_compiled and takes_starts(state.device, dtype, head_size):
        # Instead of the mask; found on the host, which then waits for no step.
        starts = document_starts(as_ids(tokens[:, :-1]), boundary_id).to(state.device, non_blocking=True)
    on_device = tokens.to(state.device, non_blocking=state.device.type == "cuda")
    inputs, targets = as_ids(on_device[:, :-1]), on_device[:, 1:]  # (B, T+1) -> 2 x (B, T)
    with torch.autocast(state.device.type, dtype=dtype, enabled=dtype is not None):
        if isinstance(model, OwnNetwork):
            return model.loss(inputs, targets)
        if training.kernels == "fused":
            hidden, is_padded = model.hidden(inputs, starts), state.device.type != "cpu"
            return head_loss(hidden, model.head_weight, targets, training.z_loss, is_padded=is_padded)
        logits = network(inputs, starts)
    return token_loss(logits, targets, training.z_loss)


def _clip(state: TrainState, *, limit: float) -> Tensor:
    if state.scaler is not None:
        state.scaler.unscale_(state.optimizers[0])
    parameters = list(state.model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return sharded_tensors.gather_full(norm)


def _update(state: TrainState) -> None:
    if state.scaler is None:
        update_weights(state.optimizers)
    else:
        state.scaler.step(state.optimizers[0])  # Muon, which would be another, needs bf16 or fp32
        state.scaler.update()
    state.model.zero_grad(set_to_none=True)
    state.step += 1


def find_spike(losses: Sequence[float], *, patience: int, rise: float) -> tuple[float, float] | None:
    """Return a spike's lowest loss and baseline: `patience` losses, each `rise` nats above the median before them."""
    if len(losses) < BASELINE_STEPS + patience:
        return None
    level = min(losses[-patience:])
    baseline = median(losses[-patience - BASELINE_STEPS : -patience])
    return (level, baseline) if level > baseline + rise else None


def find_bad_windows(
    state: TrainState, windows: token_windows.TokenWindows, drawn: NDArray[np.int64], *, training: TrainingConfig
) -> tuple[int, ...]:
    """Return the windows of `drawn` (B,) that fail alone in the run's numerics; if all do, the weights diverged."""
    state.model.eval()  # no dropout: the trial must not draw from the run's generators
    bad = [window for window in dict.fromkeys(drawn.tolist()) if not _is_sound(state, windows, window, training)]
    state.model.zero_grad(set_to_none=True)
    state.model.train()
    return tuple(bad)


def _is_sound(state: TrainState, windows: token_windows.TokenWindows, window: int, training: TrainingConfig) -> bool:
    try:
        gathered = windows.gather(np.array([window], dtype=np.int64))
    except TokenOutOfRange:
        return False
    tokens = torch.from_numpy(gathered)  # (1, T+1)
    state.model.zero_grad(set_to_none=True)
    loss = mean_loss(state, tokens, training)
    if not math.isfinite(float(loss.detach())):
        return False
    if state.scaler is not None:  # the scaler handles gradients that are too big for fp16
        return True
    loss.backward()
    gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    return math.isfinite(float(torch.nn.utils.get_total_norm(gradients)))
