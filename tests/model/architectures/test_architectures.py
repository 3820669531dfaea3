"""Networks beyond GPT-2's: what every description must hold, and gradients beside fp64."""

from typing import Any

import pytest
import torch

from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.network import ModelConfig, family_of, layer_matrices, parameter_table
from cairn.model.kernels.attention import KeyValueCache, rotate, rotations
from cairn.model.kernels.head_loss import token_loss

VOCAB, END = 61, 60
SHAPE: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 24, "block_size": 16}
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 without bias": {"bias": False},
    "qwen3": {"architecture": "qwen3"},
    "qwen3 grouped, odd width, untied": {
        "architecture": "qwen3", "n_kv_head": 2, "head_size": 10, "n_inner": 37, "tied": False
    },
    "llama": {"architecture": "qwen3", "qk_norm": False, "n_kv_head": 1},
    "squared relu, no gains, zero projections": {
        "architecture": "qwen3", "feed_forward": "relu2", "norm_gain": False, "zero_projections": True
    },
    "gpt2 with rotary positions": {"positions": "rotary", "feed_forward": "swiglu"},
    "gpt2 with n-grams": {"ngram_rows": (37, 64)},
}  # fmt: skip
every_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)


def make(network: dict[str, Any], **more: Any) -> GPT:
    """A network whose every weight is far from where it begins."""
    torch.manual_seed(3)
    model = GPT(ModelConfig(**SHAPE, **network), VOCAB, **more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tokens(rows: int = 3, length: int = 16) -> torch.Tensor:
    return torch.randint(0, END, (rows, length), generator=torch.Generator().manual_seed(1))


def gradients(model: GPT) -> torch.Tensor:
    ids = tokens()
    token_loss(model(ids[:, :-1]), ids[:, 1:]).backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


@every_network
def test_the_table_names_every_parameter_in_order_with_its_shape(network: dict[str, Any]) -> None:
    model = GPT(ModelConfig(**SHAPE, **network), VOCAB)
    found = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert found == [(row.name, row.shape) for row in parameter_table(model.config, VOCAB)]


@every_network
def test_the_parts_of_a_joined_matrix_fill_it(network: dict[str, Any]) -> None:
    table = parameter_table(ModelConfig(**SHAPE, **network), VOCAB)
    assert all(sum(row.rows) == row.shape[0] for row in table)
    assert {len(row.theirs) for row in table} <= {0, 1} | {len(row.rows) for row in table}


@every_network
def test_a_layers_matrices_are_those_of_the_table(network: dict[str, Any]) -> None:
    config = ModelConfig(**SHAPE, **network)
    matrices = [row.count for row in parameter_table(config, VOCAB) if row.kind == "matrix"]
    assert sum(matrices) == config.n_layer * layer_matrices(config)


@every_network
def test_first_values_are_those_of_the_table(network: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = ModelConfig(**{**SHAPE, "n_embd": 96, **network})
    model = GPT(config, VOCAB)
    for row in parameter_table(config, VOCAB):
        values = model.get_parameter(row.name)
        if row.std:
            assert values.std().item() == pytest.approx(row.std, rel=0.2)
        else:
            assert values.eq(row.constant).all()


@every_network
def test_gradients_are_those_of_fp64(network: dict[str, Any]) -> None:
    exact = make(network).double()
    found, wanted = gradients(make(network)), gradients(exact)
    assert (found - wanted).norm() / wanted.norm() < 1e-5


@every_network
def test_no_position_sees_a_later_token(network: dict[str, Any]) -> None:
    model, ids = make(network).eval(), tokens()
    changed = ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % END
    assert torch.equal(model(ids)[:, :10], model(changed)[:, :10])
    assert not torch.equal(model(ids)[:, 10:], model(changed)[:, 10:])


@every_network
def test_no_token_sees_another_document(network: dict[str, Any]) -> None:
    model, ids = make(network).eval(), tokens()
    model.boundary_id = END
    ids[:, 9] = END
    changed = ids.clone()
    changed[:, :9] = (ids[:, :9] + 1) % END
    assert torch.equal(model(ids)[:, 9:], model(changed)[:, 9:])


@every_network
@pytest.mark.parametrize("boundary_id", [None, END])
@pytest.mark.parametrize("sizes", [[1] * 16, [16], [5, 9, 1, 1]])
def test_with_a_cache_the_logits_are_those_of_the_whole_text(
    network: dict[str, Any], sizes: list[int], boundary_id: int | None
) -> None:
    model, ids, begin = make(network).eval(), tokens(1), 0
    model.boundary_id = boundary_id
    ids[:, [0, 6, 11, 12, 15]] = END
    cache = KeyValueCache(model.config, device=model.device)
    with torch.no_grad():
        whole = model(ids)[0]
        for size in sizes:
            found = model.extend(ids[:, begin : begin + size], cache)[0]
            begin += size
            torch.testing.assert_close(found, whole[begin - 1], atol=1e-5, rtol=0)


@every_network
@pytest.mark.parametrize("boundary_id", [None, 7])
def test_recomputed_activations_change_no_bit_of_the_gradients(
    network: dict[str, Any], boundary_id: int | None
) -> None:
    found = []
    for recompute in (False, True):
        model = make({**network, "dropout": 0.2}, activation_checkpointing=recompute).train()
        model.boundary_id = boundary_id
        torch.manual_seed(7)
        found.append(gradients(model))
    assert torch.equal(*found)


def test_shared_keys_and_values_are_those_of_as_many_heads_that_hold_the_same() -> None:
    shared, whole = make({"architecture": "qwen3", "n_kv_head": 2}), make({"architecture": "qwen3"})
    weights = shared.state_dict()
    for name in [name for name in weights if "c_attn" in name]:
        query, keys, values = weights[name].split([24, 12, 12])
        repeated = [part.view(2, 6, 24).repeat_interleave(2, dim=0).flatten(0, 1) for part in (keys, values)]
        weights[name] = torch.cat([query, *repeated])
    whole.load_state_dict(weights)
    torch.testing.assert_close(shared(tokens()), whole(tokens()))


def test_turned_products_depend_on_the_distance_alone() -> None:
    config = ModelConfig(architecture="qwen3", **SHAPE)
    query, key = torch.randn(2, 1, 1, 1, config.head_size, generator=torch.Generator().manual_seed(2))
    products = []
    for place in (0, 7):
        there, back = (rotations(config, place + far, 1, torch.device("cpu")) for far in (5, 0))
        assert there is not None and back is not None
        products.append((rotate(query, there) * rotate(key, back)).sum())
    torch.testing.assert_close(products[0], products[1])


@pytest.mark.parametrize(
    ("network", "family"),
    [
        ({}, "gpt2"),
        ({"n_inner": 20}, "gpt2"),
        ({"tied": False}, None),
        ({"architecture": "qwen3"}, "qwen3"),
        ({"architecture": "qwen3", "qk_norm": False}, "llama"),
        ({"architecture": "qwen3", "feed_forward": "relu2"}, None),
        ({"architecture": "qwen3", "bias": True}, None),
        ({"positions": "rotary"}, None),
        ({"ngram_rows": (8,)}, None),
        ({"architecture": "qwen3", "ngram_rows": (8,)}, None),
    ],
)
def test_a_network_knows_its_name_elsewhere(network: dict[str, Any], family: str | None) -> None:
    assert family_of(ModelConfig(**SHAPE, **network)) == family
