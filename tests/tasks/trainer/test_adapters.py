"""Runs that train adapters, on a store: what they resume from, and the weights beside them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cairn.model.architectures import adapters
from cairn.model.errors import InvalidInput, StateMismatch
from cairn.storage.checkpoints.checkpoint import load_checkpoint
from cairn.storage.errors import IntegrityError
from cairn.tasks.evaluator.checkpoint_model import CheckpointModel, open_model
from cairn.tasks.trainer.initial_weights import KEPT, initial_key
from cairn.tasks.trainer.trainer_channel import Place
from cairn.tasks.trainer.trainer_protocol import TrainerSpec
from cairn.tasks.trainer.training_setup import fresh_state
from tests.flipped_bit import flipped
from tests.tasks.trainer_in_process import Trained, TrainingWorld, reference_of

LORA: dict[str, Any] = {"lora": {"rank": 2, "alpha": 6.0}}
ONE = torch.ones((), dtype=torch.float64)
MODEL: dict[str, Any] = {"architecture": "qwen3", "n_head": 2, "dropout": 0.0}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TrainingWorld:
    return TrainingWorld(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def base(world: TrainingWorld) -> str:
    return world.keep_weights(**MODEL)


@pytest.fixture(scope="module")
def half(world: TrainingWorld, base: str) -> Trained:
    """A run whose machine went after its checkpoint of step 3."""
    return world.train(spec(world, base, 1), 3)


def spec(world: TrainingWorld, base: str | None, number: int, **changes: Any) -> TrainerSpec:
    training = {**LORA, **changes.pop("training", {})}
    return world.spec(number, model=MODEL, training=training, initial_weights_sha256=base, **changes)


def test_a_run_that_lost_its_machine_goes_on_in_the_bits_of_one_that_did_not(
    world: TrainingWorld, base: str, half: Trained
) -> None:
    alone = world.train(spec(world, base, 2), 6)
    resumed = world.train(spec(world, base, 3, resume=half.staged), 6)
    assert resumed.staged.state_sha256 == alone.staged.state_sha256
    assert resumed.parent.losses == alone.parent.losses[3:]


def test_a_resumed_run_has_the_adapters_of_its_checkpoint_before_its_first_step(
    world: TrainingWorld, base: str, half: Trained
) -> None:
    with world.opened(spec(world, base, 4, resume=half.staged, training={"seed": 99})) as (trainer, _):
        found = {named.name: named.tensor for named in trainer._state.live_tensors()}
        assert all(torch.equal(found[name], tensor) for name, tensor in half.tensors.items())
        assert found["optimizer.h.0.mlp.c_proj.lora.down_proj.B.exp_avg"].any()


def test_a_checkpoint_holds_no_weight_of_the_base_and_names_it(world: TrainingWorld, base: str, half: Trained) -> None:
    loaded = load_checkpoint(world.store, reference_of(half.staged))
    assert loaded.tensors and all(adapters.WITHIN in tensor.name for tensor in loaded.tensors)
    named = {tensor.name: bytes(tensor.data) for tensor in loaded.trainer.tensors}
    assert named[adapters.BASE].hex() == base


def test_the_digest_of_a_state_covers_the_weights_beside_its_adapters(world: TrainingWorld, base: str) -> None:
    other = world.keep_weights(seed=6, **MODEL)
    first, second = (world.train(spec(world, one, number), 0) for number, one in ((5, base), (6, other)))
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors if "model." in name)
    assert first.staged.state_sha256 != second.staged.state_sha256


@pytest.mark.parametrize("changed", ["another base", "another alpha", "another rank", "no adapters"])
def test_a_checkpoint_of_adapters_is_gone_on_from_only_as_it_was_made(
    world: TrainingWorld, base: str, half: Trained, changed: str
) -> None:
    begun = world.keep_weights(seed=7, **MODEL) if changed == "another base" else base
    lora = {"another alpha": {"rank": 2, "alpha": 7.0}, "another rank": {"rank": 3, "alpha": 9.0}, "no adapters": None}
    training = {"lora": lora[changed]} if changed in lora else {}
    resumed = spec(world, begun, 7, resume=half.staged, training=training)
    with pytest.raises(StateMismatch), world.opened(resumed):
        pass


def test_adapters_without_weights_to_be_beside_are_not_trained(world: TrainingWorld) -> None:
    data: Any = SimpleNamespace(snapshot=SimpleNamespace(manifest=world.manifest))
    with pytest.raises(InvalidInput, match="no weights to train beside"):
        fresh_state(world.store, spec(world, None, 8), data, Place(device=torch.device("cpu")))


@pytest.fixture(params=["flipped", "gone"])
def damaged(request: pytest.FixtureRequest, world: TrainingWorld, base: str) -> Iterator[Path]:
    """The stored base, damaged while the test runs."""
    path = world.folder / "store" / initial_key(base, KEPT)
    content = path.read_bytes()
    path.unlink()
    if request.param == "flipped":
        path.write_bytes(flipped(content, -1))
    yield path
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def opened(world: TrainingWorld, trained: Trained) -> CheckpointModel:
    return open_model(
        world.store,
        reference_of(trained.staged),
        model=spec(world, None, 1).model,
        snapshot_id=world.snapshot_id,
        cache_dir=world.folder / "cache",
        device=torch.device("cpu"),
    )


@pytest.mark.usefixtures("damaged")
def test_a_base_with_a_changed_byte_is_neither_trained_beside_nor_shown(
    world: TrainingWorld, base: str, half: Trained
) -> None:
    with pytest.raises(IntegrityError, match="initial/"), world.opened(spec(world, base, 9, resume=half.staged)):
        pass
    with pytest.raises(IntegrityError, match="initial/"):
        opened(world, half)


def test_a_checkpoint_opens_as_the_network_that_was_trained(world: TrainingWorld, base: str, half: Trained) -> None:
    tokens = torch.arange(12).reshape(1, 12)
    with world.opened(spec(world, base, 10, resume=half.staged)) as (trainer, _):
        wanted = trainer._state.model.eval()(tokens)
        trainer._state.model.train()
    network = opened(world, half).network
    assert torch.allclose(network(tokens), wanted, atol=1e-5)
    assert all(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize(
    "said",
    [
        {adapters.BASE: torch.zeros(32, dtype=torch.uint8)},
        {adapters.BASE: torch.zeros(31, dtype=torch.uint8), adapters.ALPHA: ONE},
        {adapters.BASE: torch.zeros(32), adapters.ALPHA: ONE},
        {adapters.BASE: torch.full((32,), 999), adapters.ALPHA: ONE},
        {adapters.BASE: torch.zeros(32, dtype=torch.uint8), adapters.ALPHA: torch.ones(2, dtype=torch.float64)},
    ],
)
def test_a_base_is_named_by_a_digest_and_by_nothing_else(said: dict[str, torch.Tensor]) -> None:
    with pytest.raises(StateMismatch, match="not made by cairn"):
        adapters.named_base(said)
