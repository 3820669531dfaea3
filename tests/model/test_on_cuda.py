"""What only a CUDA device can show: run with `pytest -m gpu`."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.architectures.gpt import same_document_mask
from model.data.batch_loader import BatchLoader
from model.errors import NonFiniteLoss
from model.estimates.utilization import measure_peak_flops
from model.kernels.compilation import can_compile
from model.kernels.document_attention import attend_documents, document_starts
from model.kernels.head_loss import token_loss
from model.kernels.padded_head_loss import padded_head_loss
from model.training.deferred_metrics import UpdateGuard
from model.training.determinism import make_deterministic
from model.training.training_loop import DEFERRED_STEPS, default_fetch_schedule
from model.training.training_step import launch_step
from tests.model.tiny_run import TinyRun

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 64, "dropout": 0.1}
FUSED = {"precision": "bf16", "kernels": "fused"}
STOCK = {"precision": "bf16", "kernels": "stock"}
COMPILED = {**FUSED, "compile": True}
END = 7


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    make_deterministic(seed=1, threads=1)
    yield torch.device("cuda")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", [STOCK, FUSED, COMPILED], ids=["stock", "fused", "fused and compiled"])
def test_a_continued_run_has_the_bits_of_an_undisturbed_one(tiny_run: type[TinyRun], cuda: torch.device, mode) -> None:
    whole, first, second = (tiny_run(model=SHAPE, device=cuda, **mode) for _ in range(3))
    whole.train(12)
    first.train(5)
    second.state.load(first.tensors())
    second.train(12)
    assert second.bits() == whole.bits()


@pytest.mark.parametrize("mode", [STOCK, FUSED], ids=["stock", "fused"])
def test_a_continued_run_within_documents_has_the_bits_of_an_undisturbed_one(
    tiny_run: type[TinyRun], cuda: torch.device, mode
) -> None:
    whole, first, second = (tiny_run(model=SHAPE, device=cuda, mask_documents=True, **mode) for _ in range(3))
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


def test_attending_by_bounds_is_attending_under_the_mask_with_less_memory(cuda: torch.device) -> None:
    (ours, our_bytes), (theirs, their_bytes) = attended(cuda, True), attended(cuda, False)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert our_bytes < their_bytes / 4


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attending_by_bounds_gives_the_same_bits_twice(cuda: torch.device, dropout: float) -> None:
    (first, _), (second, _) = attended(cuda, True, dropout), attended(cuda, True, dropout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_bad_step_found_late_has_changed_nothing(tiny_run: type[TinyRun], cuda: torch.device) -> None:
    run, good = (tiny_run(model=SHAPE, device=cuda, **FUSED) for _ in range(2))
    run.state.model.ln_f.weight.register_hook(lambda g: g * float("nan") if run.state.step == 5 else g)
    assert default_fetch_schedule(run.state).every_steps == DEFERRED_STEPS
    with pytest.raises(NonFiniteLoss) as caught:
        run.train(12)
    good.train(5)
    assert caught.value.step == 6 and run.bits() == good.bits()


@pytest.mark.parametrize("masked", [False, True])
def test_the_host_waits_for_no_step(tiny_run: type[TinyRun], cuda: torch.device, masked: bool) -> None:
    run = tiny_run(model=SHAPE, device=cuda, mask_documents=masked, **FUSED)
    run.state.model.boundary_id = END if masked else None
    run.train(2)
    measure_peak_flops(cuda, "bf16")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with (
            UpdateGuard(run.state.optimizers, cuda) as guard,
            BatchLoader(run.windows, run.order, cuda, end_step=12) as loader,
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
    for loss_of in (lambda h, w, t: token_loss(F.linear(h, w), t), padded_head_loss):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(h, w, targets)
        loss.backward()
        results.append((loss.detach(), h.grad, w.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-4)


def test_kernels_can_be_made_here(cuda: torch.device) -> None:
    assert can_compile(cuda)
