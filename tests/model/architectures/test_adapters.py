"""Adapters of low rank: what is trained, what is not, and what a state says of the weights beside them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cairn.model.architectures import adapters
from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import LoraConfig, TrainingConfig, adapter_table, count_trained
from cairn.model.errors import InvalidInput, StateMismatch
from cairn.model.estimates.size_estimate import TrainingPlace, checkpoint_bytes, estimate_memory
from cairn.model.kernels.head_loss import head_loss
from cairn.model.training.train_state import load_weights
from tests.model.tiny_run import VOCAB, TinyRun

Change = Callable[[dict[str, torch.Tensor]], object]
BASE = "ab" * 32
SHAPE: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8}
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {"bias": True},
    "llama": {"architecture": "qwen3", "qk_norm": False, "n_kv_head": 1},
    "qwen3": {"architecture": "qwen3", "head_size": 12, "tied": False},
}
SMOLLM2 = ModelConfig(
    architecture="qwen3", qk_norm=False, n_layer=30, n_head=9, n_kv_head=3, n_embd=576, n_inner=1536, vocab_size=49152
)


def adapted(
    network: str = "llama", *, base: str = BASE, lora: dict[str, Any] | None = None, **training: Any
) -> TinyRun:
    """A run with adapters beside weights of this name, which the run's seed drew."""
    run = TinyRun(model=NETWORKS[network], lora=lora or {"rank": 2}, **training)
    assert run.training.lora is not None
    run.state.beside = adapters.name_base(base, run.training.lora)
    return run


def base_of(run: TinyRun) -> dict[str, torch.Tensor]:
    named = run.state.model.named_parameters()
    return {name: one.detach().clone() for name, one in named if adapters.WITHIN not in name}


def hidden_tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("network", "targets", "leaves"),
    [
        ("llama", None, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("llama", ("v_proj", "q_proj"), ["q_proj", "v_proj"]),
        ("llama", ("c_attn",), ["q_proj", "k_proj", "v_proj"]),
        ("llama", ("mlp.up_proj", "self_attn.o_proj"), ["o_proj", "up_proj"]),
        ("gpt2", None, ["c_attn", "c_proj", "c_fc", "c_proj"]),
        ("gpt2", ("mlp.c_proj",), ["c_proj"]),
    ],
)
def test_targets_are_the_ends_of_published_names_or_of_ours(
    network: str, targets: tuple[str, ...] | None, leaves: list[str]
) -> None:
    table = adapter_table(ModelConfig(**SHAPE, **NETWORKS[network]), targets)
    assert [row.leaf for row in table] == leaves * 2


def test_a_target_may_name_one_layer() -> None:
    (row,) = adapter_table(ModelConfig(**SHAPE, **NETWORKS["llama"]), ("layers.1.mlp.up_proj",))
    assert (row.theirs, row.rows) == ("model.layers.1.mlp.up_proj", slice(48, 96))


@pytest.mark.parametrize(
    "target", ["proj", "embed_tokens", "lm_head", "wte", "q_norm", "Q_PROJ", "model", "h.9.attn.c_attn"]
)
def test_a_target_that_is_no_linear_layer_is_refused_with_the_list(target: str) -> None:
    with pytest.raises(InvalidInput, match=f"targets: '{target}' is no linear layer.*q_proj, k_proj, .*down_proj"):
        adapter_table(ModelConfig(**SHAPE, **NETWORKS["qwen3"]), ("q_proj", target))


@pytest.mark.parametrize(
    ("lora", "other"),
    [
        ({"rank": 0}, {}),
        ({"alpha": 0}, {}),
        ({"alpha": float("inf")}, {}),
        ({"targets": []}, {}),
        ({"targets": "q_proj"}, {}),
        ({"r": 8}, {}),
        ({}, {"optimizer": "muon"}),
        ({}, {"parallel": "fsdp"}),
        ({}, {"compile": True}),
    ],
)
def test_what_cannot_be_is_refused_by_the_section(lora: dict[str, Any], other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingConfig(steps=1, lora=lora, **other)


@pytest.mark.parametrize("network", NETWORKS)
def test_before_the_first_step_adapters_change_no_bit(network: str) -> None:
    plain, run = TinyRun(model=NETWORKS[network]), adapted(network)
    tokens = hidden_tokens()
    assert base_of(run).keys() == dict(plain.state.model.named_parameters()).keys()
    assert torch.equal(run.state.model.eval()(tokens), plain.state.model.eval()(tokens))


def test_the_first_values_are_those_of_peft_and_follow_the_seed() -> None:
    first, same, other = (adapted(seed=seed, lora={"rank": 4}).tensors() for seed in (1, 1, 2))
    downs = [name for name in first if name.endswith(".A") and name.startswith("model.")]
    assert all(torch.equal(first[name], same[name]) and not torch.equal(first[name], other[name]) for name in downs)
    for name in downs:
        bound = first[name].shape[1] ** -0.5  # Kaiming's of a = sqrt(5)
        assert 0.8 * bound < first[name].abs().max() <= bound
        assert not first[name.removesuffix("A") + "B"].any()


@pytest.mark.parametrize(("kernels", "precision"), [("stock", "fp32"), ("fused", "fp32"), ("fused", "bf16")])
def test_only_adapters_move_and_only_they_have_gradients_and_moments(kernels: str, precision: str) -> None:
    run = adapted(kernels=kernels, precision=precision, weight_decay=0.5, lr=0.1)
    base, before = base_of(run), run.tensors()
    run.train(2)
    after = run.tensors()
    assert all(torch.equal(base_of(run)[name], tensor) for name, tensor in base.items())
    assert all(adapters.WITHIN in name for name in after if name.startswith(("model.", "optimizer.")))
    assert not [name for name in after if name.startswith("model.") and torch.equal(after[name], before[name])]
    assert not any(one.requires_grad for name, one in run.state.model.named_parameters() if name in base)
    optimized = [one for group in run.state.optimizers[0].param_groups for one in group["params"]]
    assert len(optimized) == 2 * 2 * 7


def test_decay_draws_adapters_to_no_change_and_never_the_weights_beside_them() -> None:
    decayed, plain = adapted(weight_decay=1.0, lr=0.1), adapted(weight_decay=0.0, lr=0.1)
    for run in (decayed, plain):
        run.train(3)
    name = "model.h.0.attn.c_attn.lora.q_proj.A"
    assert decayed.tensors()[name].norm() < plain.tensors()[name].norm()


@pytest.mark.parametrize("loss", [head_loss, partial(head_loss, is_padded=True)])
def test_a_frozen_head_costs_no_gradient_and_changes_none(loss: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, targets = torch.randn(VOCAB, 16, generator=generator), hidden_tokens()
    gradients = []
    for trained in (True, False):
        hidden = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
        head = weight.clone().requires_grad_(trained)
        loss(hidden, head, targets).backward()
        assert (head.grad is not None) == trained
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("network", NETWORKS)
def test_added_to_the_weights_adapters_compute_the_same(network: str) -> None:
    run = adapted(network, lora={"rank": 3, "alpha": 5.0, "targets": ["c_attn", "mlp.c_proj"]}, lr=0.1)
    run.train(3)
    merged = GPT(run.model_config, VOCAB)
    load_weights(merged, {f"model.{name}": tensor for name, tensor in base_of(run).items()})
    plain = merged.eval()(hidden_tokens())
    trained = {name: one for name, one in run.state.model.named_parameters() if adapters.WITHIN in name}
    adapters.merge(merged, trained, 5.0)
    wanted = run.state.model.eval()(hidden_tokens())
    assert torch.allclose(merged(hidden_tokens()), wanted, atol=1e-5) and (wanted - plain).abs().max() > 0.01


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("h.0.attn.c_attn.lora.q_proj.B"),
        lambda found: found.update({"h.0.attn.c_attn.lora.q_proj.A": torch.zeros(2, 15)}),
        lambda found: found.update({"h.0.attn.c_attn.lora.q_proj.A": torch.zeros(())}),
        lambda found: found.update({"h.0.attn.c_attn.lora.q_proj.A": torch.zeros(0, 16)}),
        lambda found: found.update({"h.7.attn.c_attn.lora.q_proj.A": torch.zeros(2, 16)}),
        lambda found: found.update({"wte.weight": torch.zeros(VOCAB, 16)}),
    ],
)
def test_adapters_of_another_network_are_not_added(change: Change) -> None:
    run = adapted()
    found = {name: one.detach() for name, one in run.state.model.named_parameters() if adapters.WITHIN in name}
    change(found)
    with pytest.raises(StateMismatch):
        adapters.merge(GPT(run.model_config, VOCAB), found, 1.0)


def test_a_run_goes_on_from_its_adapters_and_their_moments_in_the_same_bits() -> None:
    alone, first, second = (adapted(activation_checkpointing=number == 2) for number in range(3))
    alone.train(6)
    first.train(3)
    second.state.load(first.tensors())
    assert second.bits() == first.bits()
    second.train(6)
    assert second.bits() == alone.bits()


@pytest.mark.parametrize(
    "lose",
    [
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(".exp_avg")],
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("q_proj.A")],
        lambda tensors: tensors.pop(adapters.BASE),
        lambda tensors: tensors.update({"model.wte.weight": torch.zeros(VOCAB, 16)}),
        lambda tensors: tensors.update({adapters.ALPHA: torch.tensor(3.0, dtype=torch.float64)}),
        lambda tensors: tensors.update(adapters.name_base("cd" * 32, LoraConfig(rank=2))),
    ],
    ids=["no moments", "no adapter", "no base", "a whole checkpoint", "another alpha", "another base"],
)
def test_a_state_that_is_not_this_run_s_is_never_gone_on_from(lose: Change) -> None:
    run, tensors = adapted(), adapted().tensors()
    lose(tensors)
    before = run.bits()
    with pytest.raises(StateMismatch):
        run.state.load(tensors)
    assert run.bits() == before


def test_a_whole_run_does_not_go_on_from_adapters() -> None:
    with pytest.raises(StateMismatch, match="missing"):
        TinyRun(model=NETWORKS["llama"]).state.load(adapted().tensors())


def test_weights_of_another_number_format_are_not_loaded_beside_adapters() -> None:
    run = adapted()
    halved = {f"model.{name}": tensor.bfloat16() for name, tensor in base_of(run).items()}
    with pytest.raises(StateMismatch, match=r"torch\.bfloat16, not"):
        load_weights(run.state.model, halved)


def test_activations_that_are_computed_again_change_no_bit() -> None:
    kept, again = (adapted(global_batch=6, micro_batch=2, activation_checkpointing=each) for each in (False, True))
    for run in (kept, again):
        run.train(3)
    assert kept.bits() == again.bits()


@pytest.mark.parametrize("network", NETWORKS)
def test_the_estimate_of_a_checkpoint_is_exact(network: str) -> None:
    run = adapted(network, lora={"rank": 3, "targets": ["c_proj", "c_attn"]})
    state = [named.tensor for named in run.state.named_tensors() if named.group != "trainer"]
    counters = sum(tensor.nbytes for tensor in state if tensor.ndim == 0)
    assert checkpoint_bytes(run.model_config, run.training, VOCAB) == sum(t.nbytes for t in state) - counters
    assert run.training.lora is not None
    shapes = [tensor.numel() for name, tensor in run.tensors().items() if name.startswith("model.")]
    assert sorted(count_trained(run.model_config, run.training.lora)) == sorted(shapes)


def test_a_commit_of_adapters_has_at_most_a_fiftieth_of_a_whole_one_s_bytes() -> None:
    whole, lora = TrainingConfig(steps=1), TrainingConfig(steps=1, lora=LoraConfig())
    assert checkpoint_bytes(SMOLLM2, lora, 49152) <= 0.02 * checkpoint_bytes(SMOLLM2, whole, 49152)


@pytest.mark.parametrize("on_cuda", [False, True])
def test_adapters_need_less_memory_than_all_weights(on_cuda: bool) -> None:
    def total(**changes: Any) -> int:
        training = TrainingConfig(steps=1, global_batch=8, precision="bf16", kernels="fused", **changes)
        place = TrainingPlace(on_cuda=on_cuda)
        return estimate_memory(SMOLLM2, training, 49152, micro_batch=2, recompute=False, place=place).total_bytes

    assert total(lora=LoraConfig()) < 0.8 * total()
