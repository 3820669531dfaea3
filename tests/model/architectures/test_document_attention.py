"""Attention by the bounds of documents: the preparation on the host, and what the kernel of a GPU is asked for."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from cairn.model.architectures.gpt import Block, same_document_mask
from cairn.model.configuration.network import ModelConfig
from cairn.model.kernels.attention import document_starts, takes_starts
from cairn.model.training.training_step import mean_loss
from tests.model.tiny_run import TinyRun

END, HEADS, DEPTH = 3, 2, 8
CPU, META = torch.device("cpu"), torch.device("meta")
ROWS = st.lists(st.lists(st.integers(0, 5), min_size=7, max_size=7), min_size=1, max_size=4)


def spans(starts: torch.Tensor) -> list[tuple[int, int]]:
    """Return [begin, end) of each document in the rows end to end."""
    return list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))


@given(ROWS)
def test_the_bounds_say_what_the_mask_says(rows: list[list[int]]) -> None:
    tokens = torch.tensor(rows)
    starts, seen = document_starts(tokens, END), torch.zeros(tokens.numel(), tokens.numel(), dtype=torch.bool)
    for begin, end in spans(starts):
        seen[begin:end, begin:end] = torch.ones(end - begin, end - begin).tril().bool()
    assert starts.dtype == torch.int32
    assert torch.equal(seen, torch.block_diag(*same_document_mask(tokens, END)[:, 0]).bool())


def test_finding_the_bounds_leaves_the_tokens_as_they_are() -> None:
    tokens = torch.tensor([[1, END, 2], [END, END, 4]])
    assert document_starts(tokens, END).tolist() == [0, 1, 3, 4, 6]
    assert tokens.tolist() == [[1, END, 2], [END, END, 4]]


def test_attending_document_by_document_is_attending_under_the_mask() -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 6, (3, 40))
    whole = torch.randn(3, 3, HEADS, 40, DEPTH, requires_grad=True)  # query, key, value: each (B, H, T, D)
    masked = F.scaled_dot_product_attention(*whole, attn_mask=same_document_mask(tokens, END))
    flat = whole.detach().transpose(2, 3).flatten(1, 2).requires_grad_()  # (3, BT, H, D), as the kernel takes them
    parts = [
        F.scaled_dot_product_attention(*flat[:, begin:end].transpose(1, 2), is_causal=True).transpose(0, 1)
        for begin, end in spans(document_starts(tokens, END))
    ]
    mixed = torch.cat(parts).view(3, 40, HEADS, DEPTH).transpose(1, 2)
    gradient = torch.randn_like(masked)
    masked.backward(gradient)
    mixed.backward(gradient)
    torch.testing.assert_close(mixed, masked, rtol=1e-4, atol=1e-5)
    assert whole.grad is not None and flat.grad is not None
    expected = whole.grad.transpose(2, 3).flatten(1, 2)
    torch.testing.assert_close(flat.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_asks_for_that_kernel_with_shapes_it_takes(dropout: float) -> None:
    config = ModelConfig(n_layer=1, n_head=HEADS, n_embd=HEADS * DEPTH, block_size=10, dropout=dropout)
    block = Block(config).to(META, torch.bfloat16)
    x = torch.empty(2, 10, HEADS * DEPTH, device=META, dtype=torch.bfloat16, requires_grad=True)
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = block(x, torch.empty(5, dtype=torch.int32, device=META))
    result.sum().backward()
    assert result.shape == x.shape and block.attn.c_attn.weight.grad is not None
    assert torch.Size((HEADS, 20)) in kept and not any(shape[-2:] == (10, 10) for shape in kept)


def test_bounds_are_for_half_precision_on_cuda() -> None:
    assert not takes_starts(CPU, torch.bfloat16, 64)
    cuda = torch.device("cuda")
    assert not takes_starts(cuda, None, 64) and not takes_starts(cuda, torch.bfloat16, 20)


@pytest.mark.parametrize("kernels", ["stock", "fused"])
def test_the_tokens_of_a_step_come_from_the_host(kernels: str) -> None:
    run = TinyRun(kernels=kernels, mask_documents=True)
    run.state.model.boundary_id = 7
    tokens = torch.arange(27).view(3, 9)
    expected = F.cross_entropy(run.state.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(mean_loss(run.state, tokens, run.training), expected, rtol=1e-4, atol=1e-5)
