"""One step: accumulate gradients over micro-batches, check, clip, update.

Owns loss scaling, precision and the order of checks. Refuses to know how many steps there are to take and who watches.
"""

import torch
from torch import Tensor

from model.configuration.training import Precision, TrainingConfig
from model.data.batch_loader import Batch, BatchLoader, gather_batch
from model.data.sample_order import SampleOrder
from model.data.token_windows import TokenWindows
from model.errors import InvalidInput, TokenOutOfRange
from model.kernels.head_loss import head_loss
from model.kernels.padded_head_loss import padded_head_loss
from model.kernels.token_loss import token_loss
from model.training.deferred_metrics import DeferredStep, UpdateGuard, UpdateResult, finite_loss, require_finite_norm
from model.training.determinism import Generators
from model.training.optimizer import set_learning_rate
from model.training.parallel import whole
from model.training.schedule import learning_rate
from model.training.train_state import TrainState

AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def take_step(
    state: TrainState,
    windows: TokenWindows,
    order: SampleOrder,
    *,
    training: TrainingConfig,
    micro_batch: int,
    loader: BatchLoader | None = None,
) -> UpdateResult:
    """Advance `state` by one step over the batch of `order`, `micro_batch` samples at a time.

    A `loader` over the same windows and order saves the wait for the batch and changes no bit.
    Raises NonFiniteLoss before any weight changes. In fp16 a non-finite gradient is the scaler's business instead: it
    skips the update and lowers its scale.
    """
    rate, batch = _prepare(state, windows, order, training=training, micro_batch=micro_batch, loader=loader)
    with state.generators.active(state.device):
        losses = _accumulate(state, batch, micro_batch=micro_batch, training=training)
        loss = finite_loss(losses.tolist(), step=state.step + 1, windows=batch.windows, micro_batch=micro_batch)
        grad_norm = float(_clip(state, limit=training.grad_clip))
        if state.scaler is None:
            require_finite_norm(grad_norm, step=state.step + 1, windows=batch.windows)
    _update(state)
    return UpdateResult(loss=loss, lr=rate, grad_norm=grad_norm)


def launch_step(
    state: TrainState,
    windows: TokenWindows,
    order: SampleOrder,
    *,
    training: TrainingConfig,
    micro_batch: int,
    guard: UpdateGuard,
    loader: BatchLoader | None = None,
) -> DeferredStep:
    """Advance `state` as `take_step` does, but wait for no device: what was measured stays there, unread.

    The same bits as `take_step`, as long as every number is finite. From the first step on that measured one that is
    not, `guard` lets no update change anything, and who reads the step must set `state` back to where it was before.
    """
    rate, batch = _prepare(state, windows, order, training=training, micro_batch=micro_batch, loader=loader)
    cpu, cuda = state.generators.cpu, state.generators.cuda
    with state.generators.active(state.device):
        losses = _accumulate(state, batch, micro_batch=micro_batch, training=training)
        grad_norm = _clip(state, limit=training.grad_clip)
    guard.judge(losses, grad_norm)
    unread = DeferredStep(
        step=state.step + 1,
        lr=rate,
        losses=losses,
        grad_norm=grad_norm,
        windows=batch.windows,
        micro_batch=micro_batch,
        generators=Generators(cpu=cpu, cuda=cuda),
    )
    _update(state)
    return unread


def _prepare(
    state: TrainState,
    windows: TokenWindows,
    order: SampleOrder,
    *,
    training: TrainingConfig,
    micro_batch: int,
    loader: BatchLoader | None,
) -> tuple[float, Batch]:
    if not 1 <= micro_batch <= order.global_batch:
        raise InvalidInput(f"micro_batch={micro_batch} must be from 1 to global_batch={order.global_batch}")
    rate = learning_rate(
        state.step + 1, steps=training.steps, warmup_steps=training.warmup_steps, lr=training.lr, min_lr=training.min_lr
    )
    set_learning_rate(state.optimizer, rate)
    batch = _gather(state, windows, order, loader)
    if (seed := state.ranks.step_seed(training.seed, state.step)) is not None:
        state.generators.restart(seed, state.device)
    state.optimizer.zero_grad(set_to_none=True)
    return rate, batch


def _gather(state: TrainState, windows: TokenWindows, order: SampleOrder, loader: BatchLoader | None) -> Batch:
    """This rank's rows of the step's batch; a token out of range in anybody's share is raised on every rank."""
    batch, found = None, False
    try:
        batch = (
            gather_batch(windows, order.windows_of(state.step)[state.ranks.rows(order.global_batch)])
            if loader is None
            else loader.batch(state.step)
        )
    except TokenOutOfRange:
        if state.ranks.size == 1:
            raise
        found = True
    if state.ranks.any(found):
        gather_batch(windows, order.windows_of(state.step))
    assert batch is not None
    return batch


def _accumulate(state: TrainState, batch: Batch, *, micro_batch: int, training: TrainingConfig) -> Tensor:
    ranks, losses = state.ranks, list[Tensor]()
    parts = batch.tokens.split(micro_batch)  # each (b, T+1)
    for number, part in enumerate(parts, start=1):
        tokens = part.to(state.device, non_blocking=True)  # asynchronous from page-locked memory only
        # The last part may be smaller: weighting by samples makes the sum the mean over the whole batch.
        with ranks.accumulating(is_last=number == len(parts)):
            mean: Tensor = ranks.forward(mean_loss, state, tokens, training)
            loss = mean * ranks.weight(len(part), state.global_batch)
            scaled: Tensor = loss if state.scaler is None else state.scaler.scale(loss)
            scaled.backward()
        losses.append(loss.detach())
    return ranks.combine(torch.stack(losses))  # (micro-batches,), or (1,) of all ranks


def mean_loss(state: TrainState, tokens: Tensor, training: TrainingConfig) -> Tensor:
    """Mean cross-entropy in nats, ready for the backward pass, in the run's own arithmetic: ids (B, T+1) -> scalar."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]  # (B, T+1) -> 2 x (B, T)
    dtype = AUTOCAST_DTYPES.get(training.precision)
    with torch.autocast(state.device.type, dtype=dtype, enabled=dtype is not None):
        if training.kernels == "fused":
            fused_loss = head_loss if state.device.type == "cpu" else padded_head_loss
            return fused_loss(state.model.hidden(inputs), state.model.wte.weight, targets)
        logits = state.network(inputs)
    return token_loss(logits, targets)


def _clip(state: TrainState, *, limit: float) -> Tensor:
    if state.scaler is not None:
        state.scaler.unscale_(state.optimizer)
    parameters = list(state.model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return whole(norm)


def _update(state: TrainState) -> None:
    if state.scaler is None:
        state.optimizer.step()
    else:
        state.scaler.step(state.optimizer)
        state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
