from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import Kernels, Precision, TrainingConfig
from cairn.model.estimates.size_estimate import (
    DEVICE_RUNTIME_BYTES,
    PARTS,
    RUNTIME_BYTES,
    MemoryEstimate,
    TrainingPlace,
    checkpoint_bytes,
    count_parameters,
    estimate_memory,
    largest_micro_batch,
)
from cairn.model.kernels.attention import attend
from cairn.model.kernels.block_sizes import saved_probabilities
from cairn.model.kernels.head_loss import token_loss
from cairn.model.training.train_state import TrainState

SHAPES = [
    ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8),
    ModelConfig(n_layer=3, n_head=4, n_embd=48, block_size=32),
    ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=False),
    ModelConfig(architecture="qwen3", n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_size=6, block_size=16),
    ModelConfig(architecture="qwen3", n_embd=32, feed_forward="relu2", norm_gain=False, tied=False, n_inner=20),
]
VOCAB = 301
EXACT: dict[str, Any] = {"precision": "fp32", "kernels": "stock", "probe_every_steps": 0}
TRAINING = TrainingConfig(steps=4, global_batch=4, **EXACT)
SMALL = ModelConfig(n_layer=6, n_head=6, n_embd=384, block_size=256)


def estimate(
    shape: ModelConfig, micro_batch: int, place: dict[str, Any] | None = None, vocab: int = VOCAB, **training: Any
) -> MemoryEstimate:
    return estimate_memory(
        shape,
        TrainingConfig(**{"steps": 1, "global_batch": 4, **EXACT, **training}),
        vocab,
        micro_batch=micro_batch,
        recompute=False,
        place=TrainingPlace(**place or {}),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_number_of_parameters_is_exact(shape: ModelConfig) -> None:
    network = GPT(shape, VOCAB)
    assert count_parameters(shape, VOCAB) == sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd", "muon"])
def test_a_checkpoint_is_as_big_as_its_tensors_but_for_the_step_counters(shape: ModelConfig, optimizer: str) -> None:
    training = TrainingConfig(steps=4, global_batch=4, **EXACT, optimizer=optimizer)
    state = TrainState.create(shape, training, VOCAB, torch.device("cpu"))
    tensors = [named.tensor for named in state.named_tensors() if named.group != "trainer" and named.tensor.ndim]
    assert checkpoint_bytes(shape, training, VOCAB) == sum(tensor.numel() * 4 for tensor in tensors)


def saved_bytes(network: GPT, batch: int, autocast: bool) -> int:
    """Bytes of every tensor the backward pass keeps, each storage once, without the parameters."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, VOCAB, (batch, network.config.block_size))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        loss = token_loss(network(tokens), tokens)
    del loss
    return sum(kept.values())


def to_save(shape: ModelConfig, batch: int, place: dict[str, Any] | None = None, **training: Any) -> int:
    """Bytes that are estimated to be kept: activations, the softmax of the loss and the copies of the weights."""
    made = estimate(shape, batch, place, **training)
    copies = made.parameters_bytes - 4 * count_parameters(shape, VOCAB)
    return made.activations_bytes + batch * shape.block_size * VOCAB * 4 + copies


MODES = [("fp32", "stock"), ("bf16", "stock"), ("bf16", "fused")]


NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "qwen3": {"architecture": "qwen3"},
    "grouped": {"architecture": "qwen3", "n_kv_head": 2},
    "llama": {"architecture": "qwen3", "qk_norm": False},
    "no gains": {"architecture": "qwen3", "feed_forward": "relu2", "norm_gain": False},
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize(("precision", "kernels"), MODES)
@pytest.mark.parametrize(
    ("masked", "dropout"),
    [(False, 0.0), (True, 0.1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 0.0), (False, 0.1)))],
)
def test_what_is_kept_for_the_backward_pass_is_estimated_within_a_tenth(
    network: dict[str, Any], precision: Precision, kernels: Kernels, masked: bool, dropout: float
) -> None:
    shape, batch = ModelConfig(n_layer=12, n_head=4, n_embd=64, block_size=128, dropout=dropout, **network), 2
    changes = {"precision": precision, "kernels": kernels, "mask_documents": masked}
    made = GPT(shape, VOCAB)
    made.fuse_blocks(kernels == "fused")
    made.boundary_id = 7 if masked else None
    assert saved_bytes(made, batch, precision == "bf16") == pytest.approx(to_save(shape, batch, **changes), rel=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_the_math_kernel_of_a_gpu_keeps_is_estimated_within_a_fifth(precision: Precision) -> None:
    shape, batch = ModelConfig(n_layer=12, n_head=4, n_embd=48, block_size=128), 2  # heads that flash takes not as is
    network = GPT(shape, VOCAB)
    network.boundary_id = 7
    with sdpa_kernel(SDPBackend.MATH):
        found = saved_bytes(network, batch, precision == "bf16")
    wanted = to_save(shape, batch, {"on_cuda": True}, precision=precision, mask_documents=True)
    assert found == pytest.approx(wanted, rel=0.2)


def test_on_cuda_masked_documents_cost_memory_only_where_their_bounds_cannot_be_given() -> None:
    shape, pairs = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024), 12 * 8 * 12 * 1024**2

    def on_cuda(**changes: Any) -> int:
        training = {"precision": "bf16", "kernels": "fused", **changes}
        return estimate(shape, 8, {"on_cuda": True}, 50_304, global_batch=8, **training).activations_bytes

    assert on_cuda(mask_documents=True) == on_cuda()
    assert on_cuda(mask_documents=True, compile=True) > on_cuda(compile=True) + 4 * pairs
    assert on_cuda(precision="fp32") > 4 * pairs


def test_recomputing_keeps_less_and_more_layers_keep_more() -> None:
    def kept(layers: int, recompute: bool) -> int:
        shape = ModelConfig(n_layer=layers, n_head=4, n_embd=64, block_size=64)
        return estimate_memory(shape, TRAINING, VOCAB, micro_batch=4, recompute=recompute).activations_bytes

    assert kept(8, True) < kept(8, False) and kept(1, False) < kept(8, False)


def test_the_total_is_the_sum_of_its_parts() -> None:
    made, names = estimate(SHAPES[1], 2), MemoryEstimate.__slots__
    assert made.total_bytes == sum(getattr(made, name) for name in names)
    assert tuple(f"{part}_bytes" for part in PARTS) == tuple(names)


def test_memory_never_grows_with_a_smaller_micro_batch_of_the_same_kind() -> None:
    totals = [estimate(SMALL, windows, vocab=8192, global_batch=64).total_bytes for windows in (32, 16, 8, 4, 2, 1)]
    assert totals == sorted(totals, reverse=True)


def test_a_step_of_several_micro_batches_holds_the_gradients_of_the_earlier_ones() -> None:
    one, two = (estimate(SMALL, 8, vocab=8192, global_batch=batch).gradients_bytes for batch in (8, 16))
    assert two - one == 4 * count_parameters(SMALL, 8192)


def test_several_processes_share_the_copy_of_a_checkpoint_and_fsdp_the_state() -> None:
    alone, copied, sharded = (
        estimate(SMALL, 4, {"processes": processes}, 8192, global_batch=8, parallel=parallel)
        for parallel, processes in (("ddp", 1), ("ddp", 2), ("fsdp", 2))
    )
    assert copied.host_copy_bytes == sharded.host_copy_bytes == alone.host_copy_bytes // 2
    assert copied.optimizer_bytes == alone.optimizer_bytes == 2 * sharded.optimizer_bytes


def test_sharded_processes_hold_whole_gradients_until_the_last_micro_batch_and_what_they_gathered() -> None:
    shape = ModelConfig(n_layer=12, n_head=6, n_embd=384, block_size=256)

    one, two = (estimate(shape, 1, {"processes": 2}, 1024, global_batch=batch, parallel="fsdp") for batch in (2, 4))
    whole = 4 * count_parameters(shape, 1024)
    assert one.gradients_bytes < whole <= two.gradients_bytes
    assert one.parameters_bytes > whole / 2 + 4 * 1024 * 384


def test_on_cuda_the_copy_of_a_checkpoint_is_not_the_devices() -> None:
    made = estimate(SHAPES[1], 2, {"on_cuda": True})
    assert made.host_copy_bytes == 0 and made.allocator_bytes == 0


@pytest.mark.parametrize("time", [8, 64, 100, 256, 1000])
def test_the_probabilities_counted_are_those_that_attention_keeps(time: int) -> None:
    _, kept = attend(torch.randn(2, time, 3 * 16), 4, None, 0.0)
    assert sum(block.numel() for block in kept.weights) == 2 * 4 * saved_probabilities(time)


def test_the_micro_batch_chosen_is_the_largest_half_that_fits() -> None:
    training = TrainingConfig(steps=4, global_batch=12, **EXACT)

    def chosen(memory_bytes: int) -> int | None:
        return largest_micro_batch(SHAPES[1], training, VOCAB, memory_bytes=memory_bytes, recompute=False)

    needed = [estimate(SHAPES[1], windows, global_batch=12).total_bytes for windows in (12, 11, 6, 3, 2, 1)]
    assert [*map(chosen, needed)] == [12, 6, 6, 3, 1, 1]
    assert chosen(needed[-1] - 1) is None


def test_fused_kernels_hold_no_more_logits_than_a_chunk() -> None:
    shape = ModelConfig(n_layer=8, n_head=1, n_embd=64, block_size=1024)

    def logits(kernels: Kernels, windows: int) -> int:
        return estimate(shape, windows, vocab=50_304, global_batch=16, kernels=kernels).logits_bytes

    assert logits("fused", 16) < logits("stock", 16) / 4
    assert logits("fused", 16) - logits("fused", 8) == 8 * 1024 * 64 * 4
    assert logits("stock", 16) == 2 * logits("stock", 8)


def test_a_probe_is_counted_where_it_takes_more_than_a_step() -> None:
    shape = ModelConfig(n_layer=2, n_head=2, n_embd=256, block_size=256)

    default = TrainingConfig(steps=1, global_batch=1).probe_every_steps
    usual, never, seldom = (
        estimate(shape, 1, global_batch=1, probe_every_steps=steps).total_bytes for steps in (default, 0, 7)
    )
    assert usual == seldom > never


@pytest.mark.parametrize("cuda", [False, True])
def test_an_evaluator_beside_training_is_counted_with_its_runtime_and_its_weights(cuda: bool) -> None:
    beside, alone = (estimate(SMALL, 4, {"on_cuda": cuda, "evaluates": evaluates}, 8192) for evaluates in (True, False))
    assert alone.evaluator_bytes == 0 and beside.total_bytes - alone.total_bytes == beside.evaluator_bytes
    runtime = DEVICE_RUNTIME_BYTES if cuda else RUNTIME_BYTES
    assert beside.evaluator_bytes > runtime + 4 * count_parameters(SMALL, 8192)
