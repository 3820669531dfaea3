"""One optimizer step: accumulate gradients over micro-batches, check, clip, update."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model.architectures.attention import document_starts, takes_starts
from model.configuration.training import TrainingConfig
from model.data.batch_loader import Batch, BatchLoader, gather_batch
from model.data.sample_order import SampleOrder
from model.data.token_windows import TokenWindows
from model.errors import InvalidInput, TokenOutOfRange
from model.kernels.head_loss import head_loss, padded_head_loss, token_loss
from model.training.deferred_metrics import (
    DeferredStep,
    UpdateGuard,
    UpdateResult,
    format_weights_sum,
    require_finite_norm,
    sum_finite_losses,
)
from model.training.determinism import dropout_seed, keeping_generators, seed_generators
from model.training.optimizer import set_rate, update_weights
from model.training.parallel import accumulate, gather_full
from model.training.train_state import AUTOCAST_DTYPES, TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """What every step reads; `micro_batch` in windows. A `loader` of the same windows prefetches and changes no bit."""

    windows: TokenWindows
    order: SampleOrder
    training: TrainingConfig
    micro_batch: int
    loader: BatchLoader | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.micro_batch <= self.order.global_batch:
            raise InvalidInput(
                f"micro_batch={self.micro_batch} must be from 1 to global_batch={self.order.global_batch}"
            )
        if self.loader and not (self.loader.windows is self.windows and self.loader.order == self.order):
            raise InvalidInput("the loader reads other windows or another order; make it from those of the training")


def take_step(state: TrainState, inputs: StepInputs) -> UpdateResult:
    """Advance `state` by one step.

    A non-finite loss or gradient raises NonFiniteLoss first; in fp16 the scaler skips a non-finite update instead.
    """
    rate, batch = _begin(state, inputs)
    losses, rank_seconds = _accumulate(state, inputs, batch)
    parts = state.ranks.all_micro_batches(state.global_batch, inputs.micro_batch)
    loss = sum_finite_losses(losses.tolist(), step=state.step + 1, windows=batch.windows, parts=parts)
    grad_norm = float(_clip(state, limit=inputs.training.grad_clip))
    if state.scaler is None:
        require_finite_norm(grad_norm, step=state.step + 1, windows=batch.windows)
    scale = None if state.scaler is None else state.scaler.get_scale()
    _update(state)
    digest = format_weights_sum(state.weights_sum())
    return UpdateResult(
        loss=loss,
        lr=rate,
        grad_norm=grad_norm,
        loss_scale=scale,
        weights_digest=digest,
        rank_seconds=tuple(rank_seconds.tolist()),
    )


def launch_step(state: TrainState, inputs: StepInputs, guard: UpdateGuard) -> DeferredStep:
    """Advance `state` as `take_step` does, but leave the metrics on the device, without waiting for it.

    The bits are `take_step`'s until a number is not finite: then `guard` blocks updates, and the caller resets `state`.
    """
    rate, batch = _begin(state, inputs)
    losses, rank_seconds = _accumulate(state, inputs, batch)
    grad_norm = _clip(state, limit=inputs.training.grad_clip)
    guard.check(losses, grad_norm)
    _update(state)
    return DeferredStep(
        step=state.step,
        lr=rate,
        losses=losses,
        rank_seconds=rank_seconds,
        grad_norm=grad_norm,
        weights_sum=state.weights_sum(),
        windows=batch.windows,
        parts=state.ranks.all_micro_batches(state.global_batch, inputs.micro_batch),
    )


def _begin(state: TrainState, inputs: StepInputs) -> tuple[float, Batch]:
    training = inputs.training
    rate = set_rate(state.optimizers, state.step + 1, training)
    batch = _gather(state, inputs)
    state.model.zero_grad(set_to_none=True)
    return rate, batch


def _gather(state: TrainState, inputs: StepInputs) -> Batch:
    """Gather this rank's rows, with the windows of all; an invalid token in any row raises TokenOutOfRange on all."""
    ranks, order, batch, failed = state.ranks, inputs.order, None, False
    try:
        with state.own_time.reading():
            if inputs.loader is None:
                rows = ranks.rows(order.global_batch, inputs.micro_batch)
                batch = gather_batch(inputs.windows, order.windows_of(state.step), rows=rows)
            else:
                batch = inputs.loader.batch(state.step)
    except TokenOutOfRange:
        if ranks.size == 1:
            raise
        failed = True
    if ranks.any(failed):
        gather_batch(inputs.windows, order.windows_of(state.step))
    assert batch is not None
    return batch


def _accumulate(state: TrainState, inputs: StepInputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Leave the gradient of the whole batch's mean loss in the parameters; return what `gather_losses` does."""
    ranks, parameters = state.ranks, list(state.model.parameters())
    parts = ranks.micro_batches(state.global_batch, inputs.micro_batch)
    losses: list[Tensor] = []
    with keeping_generators(state.device), state.own_time.computing():
        if ranks.is_sharded:  # each rank's gradients come unsharded until the last part has summed them up
            for number in range(len(parts)):
                _backward(state, inputs, batch, number, losses)
        else:
            backwards = (partial(_backward, state, inputs, batch, number, losses) for number in range(len(parts)))
            accumulate(parameters, backwards)
    ranks.add_up(parameters)
    return ranks.gather_losses(torch.stack(losses), state.own_time.seconds)


def _backward(state: TrainState, inputs: StepInputs, batch: Batch, number: int, losses: list[Tensor]) -> None:
    """Run one of this rank's micro-batches forward and backward, and append its share of the batch's loss."""
    ranks, training = state.ranks, inputs.training
    parts = ranks.micro_batches(state.global_batch, inputs.micro_batch)
    part, first_row = parts[number], parts[0].start
    tokens = batch.tokens[part.start - first_row : part.stop - first_row]  # (b, T+1)
    if state.model.config.dropout:
        index = ranks.rank * len(parts) + number
        seed_generators(dropout_seed(training.seed, state.step + 1, index), state.device)
    ranks.synchronize(is_last=number == len(parts) - 1)
    mean = mean_loss(state, tokens, training)
    # The last part may be smaller: weighting by samples makes the sum the mean over the whole batch.
    loss = mean * ((part.stop - part.start) / state.global_batch)
    losses.append(loss.detach())
    # Sharding averages over the ranks.
    summed = loss * ranks.size if ranks.is_sharded else loss
    scaled: Tensor = summed if state.scaler is None else state.scaler.scale(summed)
    scaled.backward()


def mean_loss(state: TrainState, tokens: Tensor, training: TrainingConfig) -> Tensor:
    """Return the mean cross-entropy in nats in the run's numerics, ready for backward: host ids (B, T+1) -> scalar."""
    dtype = AUTOCAST_DTYPES.get(training.precision)
    # Compiled layers have one shape, and the number of documents is another in every batch.
    starts = None if training.compile else _document_starts(state, tokens[:, :-1], dtype)
    on_device = tokens.to(state.device, non_blocking=state.device.type == "cuda")
    inputs, targets = on_device[:, :-1], on_device[:, 1:]  # (B, T+1) -> 2 x (B, T)
    with torch.autocast(state.device.type, dtype=dtype, enabled=dtype is not None):
        if training.kernels == "fused":
            fused_loss = head_loss if state.device.type == "cpu" else padded_head_loss
            return fused_loss(state.model.hidden(inputs, starts), state.model.head_weight, targets, training.z_loss)
        logits = state.network(inputs, starts)
    return token_loss(logits, targets, training.z_loss)


def _document_starts(state: TrainState, inputs: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """Return them on the device, where they replace the mask; found on the host, which then waits for no step."""
    boundary_id, config = state.model.boundary_id, state.model.config
    if boundary_id is None or not takes_starts(state.device, dtype, config.head_size):
        return None
    return document_starts(inputs, boundary_id).to(state.device, non_blocking=True)


def _clip(state: TrainState, *, limit: float) -> Tensor:
    if state.scaler is not None:
        state.scaler.unscale_(state.optimizers[0])
    parameters = list(state.model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return gather_full(norm)


def _update(state: TrainState) -> None:
    if state.scaler is None:
        update_weights(state.optimizers)
    else:
        state.scaler.step(state.optimizers[0])  # Muon, which would be another, needs bf16 or fp32
        state.scaler.update()
    state.model.zero_grad(set_to_none=True)
    state.step += 1
