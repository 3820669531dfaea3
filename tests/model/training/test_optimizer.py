"""AdamW's decay split and its state, the learning rate of each step, and Muon's batched update beside torch's own."""

import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Muon

from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.training.optimizer import (
    learning_rate,
    make_optimizers,
    moments_of,
    orthogonalize,
    set_rate,
    update_matrices,
    update_weights,
)


def make():
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=4), 11)
    (optimizer,) = make_optimizers(model, TrainingConfig(steps=1, weight_decay=0.3))
    return model, optimizer


def decay_of(model, optimizer):
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    return {name: decays[id(p)] for name, p in model.named_parameters()}


def test_matrices_and_embeddings_decay() -> None:
    model, optimizer = make()
    assert {decay_of(model, optimizer)[name] for name, p in model.named_parameters() if p.ndim == 2} == {0.3}


def test_norms_and_biases_do_not_decay() -> None:
    model, optimizer = make()
    decays = decay_of(model, optimizer)
    assert {decays[name] for name in decays if "ln_" in name or name.endswith("bias")} == {0.0}


def test_every_parameter_has_its_moments_before_the_first_step() -> None:
    model, optimizer = make()
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in model.parameters())


def test_moments_made_beforehand_give_the_update_torch_would_give() -> None:
    model, optimizer = make()
    reference = GPT(model.config, 11)
    reference.load_state_dict(model.state_dict())
    groups = [
        {"params": [p for p in reference.parameters() if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in reference.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    for network, take in ((model, partial(update_weights, [optimizer])), (reference, plain.step)):
        network(torch.arange(4)[None]).square().sum().backward()
        take()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("adam", {"step", "exp_avg", "exp_avg_sq"}),
        ("momentum", {"momentum_buffer"}),
        ("sgd", set()),
    ],
)
def test_every_optimizer_keeps_its_own_moments_for_every_parameter(name, kept) -> None:
    model, _ = make()
    optimizers = make_optimizers(model, TrainingConfig(steps=1, optimizer=name))
    assert all(set(moments_of(optimizers, p)) == kept for p in model.parameters())


def test_muon_has_the_matrices_of_layers_and_adamw_the_rest() -> None:
    model, _ = make()
    optimizers = make_optimizers(model, TrainingConfig(steps=1, optimizer="muon"))
    kept = {name: set(moments_of(optimizers, p)) for name, p in model.named_parameters()}
    matrices = {name for name, p in model.named_parameters() if name.startswith("h.") and p.ndim == 2}
    assert {name for name, moments in kept.items() if moments == {"momentum_buffer"}} == matrices
    assert all(moments == {"step", "exp_avg", "exp_avg_sq"} for name, moments in kept.items() if name not in matrices)


def test_muons_rate_rises_and_falls_with_the_others() -> None:
    model, _ = make()
    training = TrainingConfig(steps=100, warmup_steps=10, lr=0.01, min_lr=0.0, muon_lr=0.03, optimizer="muon")
    rest, matrices = make_optimizers(model, training)
    for step in (5, 50):
        rate = set_rate((rest, matrices), step, training)
        assert rest.param_groups[0]["lr"] == rate
        assert matrices.param_groups[0]["lr"] == pytest.approx(3 * rate)


@pytest.mark.parametrize("other", [{"precision": "fp16"}, {"parallel": "fsdp"}])
def test_muon_is_refused_where_its_products_would_be_others(other) -> None:
    with pytest.raises(ValueError, match=r"optimizer='muon' cannot be combined with \w+='(fp16|fsdp)'"):
        TrainingConfig(steps=1, optimizer="muon", **other)


def test_an_update_does_not_import_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it raises
    model, optimizer = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.arange(4)[None]).square().sum().backward()
    update_weights([optimizer])
    optimizer.zero_grad()
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


SETTINGS = TrainingConfig(steps=110, warmup_steps=10, lr=1.0, min_lr=0.1)
STABLE = SETTINGS.model_copy(update={"schedule": "wsd", "decay_fraction": 0.5})


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 0.1), (5, 0.5), (10, 1.0), (60, 0.55), (110, 0.1), (111, 0.1), (10_000, 0.1)]
)
def test_the_rate_warms_up_linearly_and_falls_as_a_cosine_to_its_floor(step, rate) -> None:
    assert learning_rate(step, SETTINGS) == pytest.approx(rate)


def test_a_quarter_of_the_way_down_the_cosine_has_its_value() -> None:
    assert learning_rate(35, SETTINGS) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + 0.5**0.5))


@given(st.integers(1, 200), st.integers(0, 110))
def test_the_rate_is_positive_and_never_above_the_peak(step, warmup_steps) -> None:
    assert 0 < learning_rate(step, SETTINGS.model_copy(update={"warmup_steps": warmup_steps})) <= 1.0


@given(st.integers(10, 200))
def test_the_rate_never_rises_after_the_warm_up(step) -> None:
    assert learning_rate(step + 1, SETTINGS) <= learning_rate(step, SETTINGS)


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 0.1), (10, 1.0), (11, 1.0), (55, 1.0), (66, 0.82), (99, 0.28), (110, 0.1), (111, 0.1)]
)
def test_the_rate_stays_after_the_warm_up_and_falls_linearly_at_the_end(step, rate) -> None:
    assert learning_rate(step, STABLE) == pytest.approx(rate)


def test_a_longer_schedule_that_stays_has_the_rates_of_the_shorter_one_up_to_its_fall() -> None:
    longer = STABLE.model_copy(update={"steps": 300})
    assert [learning_rate(n, longer) for n in range(1, 56)] == [learning_rate(n, STABLE) for n in range(1, 56)]


def test_a_fall_that_begins_in_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup_steps=60 and decay_fraction=0\.5, 50 steps, must together be"):
        TrainingConfig(steps=100, warmup_steps=60, schedule="wsd", decay_fraction=0.5)


SHAPES = [(24, 8), (8, 24), (12, 12), (12, 12)]


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def optimizer_of(parameters: list[torch.Tensor], rows: list[tuple[int, ...]]) -> Muon:
    made = Muon([{"params": parameters, "rows": rows}], lr=0.02, weight_decay=0.1, momentum=0.95)
    for parameter in parameters:
        made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made


def give_gradients(parameters: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_steps_are_torchs_up_to_half_precision() -> None:
    ours, theirs = matrices(), matrices()
    optimizer, reference = optimizer_of(ours, [shape[:1] for shape in SHAPES]), Muon(theirs, lr=0.02, weight_decay=0.1)
    for step in range(3):
        for parameters in (ours, theirs):
            give_gradients(parameters, step)
        with torch.no_grad():
            update_matrices(optimizer)
        reference.step()
    for found, wanted, began in zip(ours, theirs, matrices(), strict=True):
        assert (found - wanted).norm() < 0.02 * (wanted - began).norm()
        torch.testing.assert_close(
            optimizer.state[found]["momentum_buffer"], reference.state[wanted]["momentum_buffer"]
        )


def test_joined_matrices_move_as_they_would_apart() -> None:
    apart = matrices()[2:]
    joined = torch.cat([part.detach() for part in apart]).requires_grad_()
    give_gradients(apart, 1)
    joined.grad = torch.cat([part.grad for part in apart])  # type: ignore[misc]
    with torch.no_grad():
        update_matrices(optimizer_of(apart, [(12,), (12,)]))
        update_matrices(optimizer_of([joined], [(12, 12)]))
    assert torch.equal(joined, torch.cat(apart))


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    made = orthogonalize(matrix, (3.4445, -4.7750, 2.0315), steps=5, epsilon=1e-7).float()
    found = torch.linalg.svdvals(made)
    assert found.min() > 0.3 and found.max() < 1.5


def test_a_blocked_update_changes_nothing_even_where_gradients_are_not_numbers() -> None:
    parameters = matrices()
    optimizer = optimizer_of(parameters, [shape[:1] for shape in SHAPES])
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    with torch.no_grad():
        update_matrices(optimizer)
    assert all(torch.equal(found, began) for found, began in zip(parameters, matrices(), strict=True))
    assert all(optimizer.state[parameter]["momentum_buffer"].eq(0).all() for parameter in parameters)
