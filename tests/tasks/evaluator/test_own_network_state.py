"""The state of a network of one's own in a store: staged, read back in place, opened, exported with all of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cairn.storage.stores.codec import sha256
from cairn.tasks.configuration.network_module import keep_files
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.evaluator.checkpoint_model import CheckpointModel, open_model, write_model_directory
from cairn.tasks.trainer.trainer_protocol import TrainerSpec
from tests.networks.own_files import layers
from tests.tasks.trainer_in_process import Trained, TrainingWorld, reference_of

FILES = layers(
    'self.scale = nn.Parameter(torch.ones(())); self.register_buffer("place", torch.arange(3.0))', "x = x * self.scale"
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TrainingWorld]:
    """A store with the files, whose network has a number, vectors, matrices and a buffer."""
    world = TrainingWorld(tmp_path)
    keep_files(world.store, own_spec(world, 0).model, FILES)
    before = torch.get_num_threads()
    yield world
    torch.set_num_threads(before)


def own_spec(world: TrainingWorld, attempt: int, resume: Trained | None = None) -> TrainerSpec:
    digest = sha256(FILES["net.py"])
    return world.spec(
        attempt,
        model={"module": "net.py:build", "files": {"net.py": digest}},
        training={"kernels": "stock"},
        allowed_code=(digest,),
        resume=resume.staged if resume else None,
    )


def opened(world: TrainingWorld, trained: Trained, *allowed: str) -> CheckpointModel:
    return open_model(
        world.store,
        reference_of(trained.staged),
        model=own_spec(world, 0).model,
        snapshot_id=world.snapshot_id,
        cache_dir=world.folder / "cache",
        device=torch.device("cpu"),
        allowed_code=allowed,
    )


def test_an_attempt_that_resumes_ends_with_the_bits_of_an_undisturbed_one(world: TrainingWorld) -> None:
    whole = world.train(own_spec(world, 1), 4)
    begun = world.train(own_spec(world, 2), 2)
    resumed = world.train(own_spec(world, 3, begun), 4)
    assert resumed.staged.state_sha256 == whole.staged.state_sha256 != begun.staged.state_sha256


def test_the_manifest_of_a_checkpoint_names_the_file_by_its_digest(world: TrainingWorld) -> None:
    trained = world.train(own_spec(world, 1), 1)
    document = json.loads(world.store.read(f"{trained.staged.prefix}/trainer.json"))
    assert document["versions"]["net.py"] == own_spec(world, 1).allowed_code[0]


def test_what_is_exported_has_every_tensor_of_its_state_and_its_file(world: TrainingWorld) -> None:
    trained, folder = world.train(own_spec(world, 1), 2), world.folder / "exported"
    found = opened(world, trained, *own_spec(world, 1).allowed_code)
    write_model_directory(folder, found, card="")
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == {name.removeprefix("module.") for name in found.network.state_dict()}
    assert torch.equal(tensors["scale"], trained.tensors["model.scale"])
    assert (folder / "net.py").read_bytes() == FILES["net.py"]


def test_it_is_not_opened_without_leave(world: TrainingWorld) -> None:
    trained = world.train(own_spec(world, 1), 1)
    with pytest.raises(InvalidConfiguration, match="CAIRN_CODE__ALLOW"):
        opened(world, trained)
