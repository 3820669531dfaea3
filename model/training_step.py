"""One step: accumulate gradients over micro-batches, check, clip, update.

Owns loss scaling, precision and the order of checks. Refuses to know how many steps there are to take and who watches.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch_loader import Batch, BatchLoader, gather_batch
from model.configuration import Precision, TrainingConfig
from model.errors import InvalidInput, NonFiniteLoss
from model.head_loss import head_loss
from model.loss import token_loss
from model.optimizer import set_learning_rate
from model.sample_order import SampleOrder
from model.schedule import learning_rate
from model.token_windows import TokenWindows
from model.train_state import TrainState

AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step measured: mean loss in nats per token, the rate used, the gradient norm before clipping."""

    loss: float
    lr: float
    grad_norm: float


def take_step(
    state: TrainState,
    windows: TokenWindows,
    order: SampleOrder,
    *,
    training: TrainingConfig,
    micro_batch: int,
    loader: BatchLoader | None = None,
) -> StepResult:
    """Advance `state` by one step over the batch of `order`, `micro_batch` samples at a time.

    A `loader` over the same windows and order saves the wait for the batch and changes no bit.
    Raises NonFiniteLoss before any weight changes. In fp16 a non-finite gradient is the scaler's business instead: it
    skips the update and lowers its scale.
    """
    if not 1 <= micro_batch <= order.global_batch:
        raise InvalidInput(f"micro_batch={micro_batch} must be from 1 to global_batch={order.global_batch}")
    number = state.step + 1
    rate = learning_rate(
        number, steps=training.steps, warmup_steps=training.warmup_steps, lr=training.lr, min_lr=training.min_lr
    )
    set_learning_rate(state.optimizer, rate)
    batch = gather_batch(windows, order.windows_of(state.step)) if loader is None else loader.batch(state.step)
    state.optimizer.zero_grad(set_to_none=True)
    with state.generators.active(state.device):
        loss = _accumulate(state, batch, micro_batch=micro_batch, training=training)
        grad_norm = _clip(state, batch, limit=training.grad_clip)
    _update(state)
    state.optimizer.zero_grad(set_to_none=True)
    state.step = number
    return StepResult(loss=loss, lr=rate, grad_norm=grad_norm)


def _accumulate(state: TrainState, batch: Batch, *, micro_batch: int, training: TrainingConfig) -> float:
    losses: list[Tensor] = []
    parts = batch.tokens.split(micro_batch)  # each (b, T+1)
    for part in parts:
        tokens = part.to(state.device, non_blocking=True)  # asynchronous from page-locked memory only
        # The last part may be smaller: weighting by samples makes the sum the mean over the whole batch.
        loss = _mean_loss(state, tokens, training) * (len(part) / len(batch.tokens))
        scaled: Tensor = loss if state.scaler is None else state.scaler.scale(loss)
        scaled.backward()
        losses.append(loss.detach())
    values: list[float] = torch.stack(losses).tolist()
    for number, value in enumerate(values):
        if not math.isfinite(value):
            state.optimizer.zero_grad(set_to_none=True)
            guilty = batch.windows[number * micro_batch : (number + 1) * micro_batch]
            raise NonFiniteLoss(step=state.step + 1, quantity="loss", value=value, windows=guilty)
    return math.fsum(values)


def _mean_loss(state: TrainState, tokens: Tensor, training: TrainingConfig) -> Tensor:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]  # (B, T+1) -> 2 x (B, T)
    dtype = AUTOCAST_DTYPES.get(training.precision)
    with torch.autocast(state.device.type, dtype=dtype, enabled=dtype is not None):
        if training.kernels == "fused":
            return head_loss(state.model.hidden(inputs), state.model.wte.weight, targets)
        logits = state.network(inputs)
    return token_loss(logits, targets)


def _clip(state: TrainState, batch: Batch, *, limit: float) -> float:
    if state.scaler is not None:
        state.scaler.unscale_(state.optimizer)
    parameters = list(state.model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    value = float(norm)
    if state.scaler is None and not math.isfinite(value):
        state.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteLoss(step=state.step + 1, quantity="grad_norm", value=value, windows=batch.windows)
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return value


def _update(state: TrainState) -> None:
    if state.scaler is None:
        state.optimizer.step()
    else:
        state.scaler.step(state.optimizer)
        state.scaler.update()
