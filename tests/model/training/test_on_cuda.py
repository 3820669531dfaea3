"""What only a CUDA device can show: run with `pytest -m gpu`, or by `make gpu-check`.

`CAIRN_TEST_DEVICE=cpu` tries the tests themselves elsewhere, as far as they go there.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cairn.model.architectures.gpt import same_document_mask
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.batch_loader import BatchLoader
from cairn.model.errors import NonFiniteLoss
from cairn.model.estimates.numerics import choose_numerics
from cairn.model.estimates.utilization import measure_machine, measure_peak_flops
from cairn.model.kernels.attention import attend_documents, document_starts
from cairn.model.kernels.head_loss import can_compile, head_loss, token_loss
from cairn.model.training.determinism import make_deterministic
from cairn.model.training.training_loop import (
    DEFERRED_STEPS,
    FETCH_EVERY_STEP,
    FetchSchedule,
    default_fetch_schedule,
)
from cairn.model.training.training_step import UpdateGuard, launch_step
from tests.device import device_under_test
from tests.model.tiny_run import TinyRun

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 64, "dropout": 0.1}
GROUPED = {**SHAPE, "architecture": "qwen3", "n_head": 4, "n_kv_head": 2}
FUSED = {"precision": "bf16", "kernels": "fused"}
STOCK = {"precision": "bf16", "kernels": "stock"}
COMPILED = {**FUSED, "compile": True}
END = 7


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """The device under test."""
    device = device_under_test()
    make_deterministic(seed=1, threads=1)
    yield device
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def only_cuda(cuda: torch.device) -> torch.device:
    """The device under test, where it is CUDA."""
    if cuda.type != "cuda":
        pytest.skip("says something of CUDA alone")
    return cuda


def test_what_is_chosen_here_is_bf16_and_fused(only_cuda: torch.device) -> None:
    chosen = choose_numerics(TrainingConfig(steps=1), ModelConfig(), measure_machine())
    assert (chosen.precision, chosen.kernels) == ("bf16", "fused")


@pytest.mark.parametrize("mode", [STOCK, FUSED, COMPILED], ids=["stock", "fused", "fused and compiled"])
@pytest.mark.parametrize("shape", [SHAPE, GROUPED], ids=["gpt2", "qwen3"])
def test_a_continued_run_has_the_bits_of_an_undisturbed_one(cuda: torch.device, shape, mode) -> None:
    whole, first, second = (TinyRun(model=shape, device=cuda, **mode) for _ in range(3))
    whole.train(12)
    first.train(5)
    second.state.load(first.tensors())
    second.train(12)
    assert second.bits() == whole.bits()


@pytest.mark.parametrize("mode", [STOCK, FUSED], ids=["stock", "fused"])
def test_a_continued_run_within_documents_has_the_bits_of_an_undisturbed_one(cuda: torch.device, mode) -> None:
    whole, first, second = (TinyRun(model=SHAPE, device=cuda, mask_documents=True, **mode) for _ in range(3))
    for run in (whole, first, second):
        run.state.model.boundary_id = END
    whole.train(12)
    first.train(5)
    second.state.load(first.tensors())
    second.train(12)
    assert second.bits() == whole.bits()


def attended(cuda: torch.device, by_bounds: bool, dropout: float = 0.0) -> tuple[list[torch.Tensor], int]:
    """Return the result of attention within documents, its three gradients, and the bytes it took at most."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 300, (4, 1024), generator=generator)
    joint = torch.randn(3, 4, 1024, 6, 64, generator=generator).to(cuda, torch.bfloat16).requires_grad_()
    gradient = torch.randn(4, 1024, 6, 64, generator=generator).to(cuda, torch.bfloat16)
    torch.manual_seed(2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if by_bounds:
        mixed = attend_documents(*joint, document_starts(tokens, END).to(cuda), dropout)
    else:
        visible = same_document_mask(tokens.to(cuda), END)
        with sdpa_kernel(SDPBackend.MATH):
            mixed = F.scaled_dot_product_attention(*joint.transpose(2, 3), attn_mask=visible).transpose(1, 2)
    (of_joint,) = torch.autograd.grad(mixed, joint, gradient)
    return [mixed.detach(), *of_joint], torch.cuda.max_memory_allocated() - before


def test_attending_by_bounds_is_attending_under_the_mask_with_less_memory(only_cuda: torch.device) -> None:
    (ours, our_bytes), (theirs, their_bytes) = attended(only_cuda, True), attended(only_cuda, False)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert our_bytes < their_bytes / 4


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attending_by_bounds_gives_the_same_bits_twice(only_cuda: torch.device, dropout: float) -> None:
    (first, _), (second, _) = attended(only_cuda, True, dropout), attended(only_cuda, True, dropout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def grouped(cuda: torch.device, by_bounds: bool, is_repeated: bool) -> list[torch.Tensor]:
    """Return attention of eight heads, four to a key, and its gradients; or with the keys and values repeated."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(2, 256, heads, 64, generator=generator) for heads in (8, 2, 2)]
    query, key, value = (part.to(cuda, torch.bfloat16).requires_grad_() for part in parts)
    keys, values = (part.repeat_interleave(4, dim=2) if is_repeated else part for part in (key, value))
    if by_bounds:
        starts = document_starts(torch.randint(0, 100, (2, 256), generator=generator), END).to(cuda)
        mixed = attend_documents(query, keys, values, starts, 0.0)
    else:
        heads = (part.transpose(1, 2) for part in (query, keys, values))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=not is_repeated).transpose(1, 2)
    gradient = torch.randn(mixed.shape, generator=generator).to(cuda, torch.bfloat16)
    return [mixed.detach(), *torch.autograd.grad(mixed, (query, key, value), gradient)]


@pytest.mark.parametrize("by_bounds", [False, True])
def test_heads_that_share_keys_have_the_bits_of_repeated_keys(only_cuda: torch.device, by_bounds: bool) -> None:
    shared, repeated = grouped(only_cuda, by_bounds, False), grouped(only_cuda, by_bounds, True)
    assert all(torch.equal(a, b) for a, b in zip(shared, repeated, strict=True))


DEFERRED = FetchSchedule(every_steps=DEFERRED_STEPS, every_seconds=3600.0)


def test_metrics_are_deferred_here(only_cuda: torch.device) -> None:
    assert default_fetch_schedule(TinyRun(model=SHAPE, device=only_cuda, **FUSED).state).every_steps == DEFERRED_STEPS


def test_deferred_metrics_are_those_that_are_read_at_once(cuda: torch.device) -> None:
    late, at_once = (TinyRun(model=SHAPE, device=cuda, **FUSED) for _ in range(2))
    pairs = zip(late.train(12, schedule=DEFERRED), at_once.train(12, schedule=FETCH_EVERY_STEP), strict=True)
    assert all(
        (one.train_loss, one.grad_norm, one.weights_digest) == (two.train_loss, two.grad_norm, two.weights_digest)
        for one, two in pairs
    )
    assert late.bits() == at_once.bits()


def test_a_bad_step_found_late_has_changed_nothing(cuda: torch.device) -> None:
    run, good = (TinyRun(model=SHAPE, device=cuda, **FUSED) for _ in range(2))
    run.state.model.ln_f.weight.register_hook(lambda g: g * float("nan") if run.state.step == 5 else g)
    with pytest.raises(NonFiniteLoss) as caught:
        run.train(12, schedule=DEFERRED)
    good.train(5)
    assert caught.value.step == 6 and run.bits() == good.bits()


@pytest.mark.parametrize("masked", [False, True])
def test_the_host_waits_for_no_step(only_cuda: torch.device, masked: bool) -> None:
    run = TinyRun(model=SHAPE, device=only_cuda, mask_documents=masked, **FUSED)
    run.state.model.boundary_id = END if masked else None
    run.train(2, micro_batch=3)  # kernels are compiled for each size
    measure_peak_flops(only_cuda, "bf16")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with (
            UpdateGuard(run.state.optimizers, only_cuda) as guard,
            closing(BatchLoader(run.windows, run.order, only_cuda, end_step=12)) as loader,
        ):
            for _ in range(3):
                launch_step(run.state, run.inputs(micro_batch=3, loader=loader), guard)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("vocab_size", [1000, 50257])
def test_the_head_says_what_whole_logits_say(cuda: torch.device, vocab_size) -> None:
    generator = torch.Generator(cuda).manual_seed(1)
    hidden = torch.randn((4, 100, 64), generator=generator, device=cuda)
    weight = torch.randn((vocab_size, 64), generator=generator, device=cuda) * 0.1
    targets = torch.randint(0, vocab_size, (4, 100), generator=generator, device=cuda)
    results = []
    for loss_of in (lambda h, w, t: token_loss(F.linear(h, w), t), partial(head_loss, is_padded=True)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(h, w, targets)
        loss.backward()
        results.append((loss.detach(), h.grad, w.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-4)


def test_kernels_can_be_made_here(only_cuda: torch.device) -> None:
    assert can_compile(only_cuda)


def test_a_batch_read_ahead_is_page_locked(only_cuda: torch.device) -> None:
    run = TinyRun(model=SHAPE, device=only_cuda)
    with closing(BatchLoader(run.windows, run.order, only_cuda, end_step=12)) as loader:
        assert loader.batch(0).tokens.is_pinned() and loader.batch(1).tokens.is_pinned()


def test_an_overflow_in_fp16_changes_no_weight_and_halves_the_scale(cuda: torch.device) -> None:
    run, good = (TinyRun(model=SHAPE, device=cuda, precision="fp16") for _ in range(2))
    run.state.model.ln_f.weight.register_hook(lambda g: g * float("inf") if run.state.step == 5 else g)
    run.train(6)
    good.train(5)
    weights = (dict(one.state.model.named_parameters()) for one in (run, good))
    assert all(torch.equal(*pair) for pair in zip(*(named.values() for named in weights), strict=True))
    assert run.state.scaler is not None and good.state.scaler is not None
    assert run.state.scaler.get_scale() == good.state.scaler.get_scale() / 2


def test_recomputed_activations_change_no_bit_and_take_less_memory(cuda: torch.device) -> None:
    wide = {**SHAPE, "n_layer": 6, "n_embd": 256}
    found = []
    for recomputes in (False, True):
        run = TinyRun(model=wide, device=cuda, activation_checkpointing=recomputes, **FUSED)
        run.train(2)
        if cuda.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run.train(5)
        found.append((torch.cuda.max_memory_allocated() if cuda.type == "cuda" else -int(recomputes), run.bits()))
        del run
    (kept_bytes, kept), (recomputed_bytes, recomputed) = found
    assert kept == recomputed and recomputed_bytes < kept_bytes
