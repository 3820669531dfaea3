"""A run that begins from weights: read once, kept by hash, the same bits wherever and however often it starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput
from cairn.storage.errors import IntegrityError
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.token_import import numbered_vocabulary
from cairn.tasks.evaluator.checkpoint_model import write_model_directory
from cairn.tasks.trainer.initial_weights import InitialDirectory, keep_initial_weights, read_initial_weights
from cairn.tasks.trainer.trainer_protocol import Ready, TrainerSpec
from tests.tasks.committed_model import commit_model, small_configuration
from tests.tasks.trainer_in_process import TrainingWorld

pytestmark = pytest.mark.usefixtures("forked_parsers")


class Exported:
    """A committed model that lies in `out` as a directory, and the store of the run that begins from it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.store = folder, folder / "out", LocalStore(folder / "store")
        self.model = commit_model(self.store, folder, small_configuration())
        opened = self.model.open(folder)
        self.weights, self.snapshot = dict(self.model.state.model.named_parameters()), opened.snapshot
        write_model_directory(self.out, opened, card="")

    def keep(self, **changes: Any) -> str:
        """Keep the weights of `out` for a run on the model's own snapshot; return their hash."""
        own = {"tokenizer_json": self.snapshot.tokenizer_json, "vocab_size": self.snapshot.manifest.vocab_size}
        directory = InitialDirectory("out", self.folder)
        return keep_initial_weights(self.store, directory, self.model.config.model, **own | changes).weights_sha256

    def trainers(self) -> TrainingWorld:
        """Return trainers on the model's own snapshot."""
        data = self.model.config.data.model_dump(exclude={"sources"})
        return TrainingWorld(self.folder, texts={"text.jsonl": (self.folder / "text.jsonl").read_text()}, **data)

    def spec(self, world: TrainingWorld, sha256: str | None, machine: str = "here") -> TrainerSpec:
        """Return what a trainer is sent that begins at step 0 on a machine with files of its own."""
        training = {**self.model.config.training.model_dump(), "init_from": "out"}
        shape = {**self.model.config.model.model_dump(), "dropout": 0.1}
        made = world.spec(1, model=shape, training=training, micro_batch=2, initial_weights_sha256=sha256)
        return made.model_copy(update={name: world.folder / machine / name for name in ("cache_dir", "work_dir")})


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    return Exported(tmp_path)


def test_step_0_has_exactly_the_exported_weights(exported: Exported) -> None:
    world = exported.trainers()
    with world.opened(exported.spec(world, exported.keep())) as (trainer, parent):
        assert parent.last(Ready).step == 0
        begun = dict(trainer._state.model.named_parameters())
        assert begun.keys() == exported.weights.keys()
        assert all(begun[name].equal(weight) for name, weight in exported.weights.items())


def test_killed_before_its_first_commit_it_begins_elsewhere_with_the_same_bits(exported: Exported) -> None:
    sha256, world = exported.keep(), exported.trainers()
    with world.opened(exported.spec(world, sha256)) as (killed, _):
        killed.train_segment(2)  # staged, never committed
    shutil.rmtree(exported.out)
    there, elsewhere = (world.train(exported.spec(world, sha256, place), 4) for place in ("there", "elsewhere"))
    assert there.staged.state_sha256 == elsewhere.staged.state_sha256


def test_a_run_that_names_no_weights_draws_its_own(exported: Exported) -> None:
    world = exported.trainers()
    with world.opened(exported.spec(world, None)) as (trainer, _):
        assert not trainer._state.model.wte.weight.equal(exported.weights["wte.weight"])


def test_equal_weights_are_kept_once_and_read_back(exported: Exported) -> None:
    first, second = exported.keep(), exported.keep()
    names = [key for key in exported.store.keys("initial") if key.endswith("weights.safetensors")]
    assert first == second and names == [f"initial/{first}/weights.safetensors"]
    kept = read_initial_weights(exported.store, first)
    assert all(torch.from_numpy(kept[name]).equal(parameter) for name, parameter in exported.weights.items())


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_kept_weights_that_do_not_verify_are_not_used_and_can_be_kept_again(exported: Exported, damage: str) -> None:
    sha256 = exported.keep()
    store, key = exported.store, f"initial/{sha256}/weights.safetensors"
    store.write(key, store.read(key)[:-1] + b"?") if damage == "flipped" else store.delete(key)
    with pytest.raises(IntegrityError, match=key):
        read_initial_weights(exported.store, sha256)
    assert exported.keep() == sha256
    assert read_initial_weights(exported.store, sha256)


def test_weights_in_shards_and_in_bfloat16_are_read(exported: Exported) -> None:
    folder = exported.out
    halves = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    names = {}
    for number in range(2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = dict(list(halves.items())[number::2])
        save_file(part, folder / file)
        names |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    kept = torch.from_numpy(read_initial_weights(exported.store, exported.keep())["wte.weight"])
    assert kept.equal(exported.weights["wte.weight"].detach().bfloat16().float()) and kept.dtype == torch.float32


def test_a_pickle_is_refused_by_name(exported: Exported) -> None:
    (exported.out / "model.safetensors").rename(exported.out / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match=r"training.init_from = 'out': pytorch_model.bin is a pickle"):
        exported.keep()


def _header(dtype: str, shape: list[int], begin: int = 0) -> bytes:
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + 4]}
    return json.dumps({"transformer.wte.weight": tensor}).encode()


@pytest.mark.parametrize("name", ["../out/model.safetensors", "absent.safetensors", "model.bin"])
def test_an_index_may_only_name_files_beside_it(exported: Exported, name: str) -> None:
    (exported.out / "model.safetensors").unlink()
    (exported.out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InvalidInput, match=r"index\.json"):
        exported.keep()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_torn_is_named(exported: Exported, file: str) -> None:
    path = exported.out / file
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InvalidInput, match=rf"training.init_from = 'out': {file}"):
        exported.keep()


HEADERS = {
    "longer than the file": (2**62, b"{}"),
    "no JSON": (2, b"{,"),
    "a million dimensions": (None, _header("F32", [1] * 1_000_000)),
    "an overflow": (None, _header("F32", [2**32] * 9)),
    "a type that numpy has not": (None, _header("F8_E4M3", [4])),
    "a gap": (None, _header("F32", [1], begin=4)),
}
"""Headers of a file of four bytes of data, and the length that it claims for them, None: the true one."""


@pytest.mark.parametrize("damage", HEADERS)
def test_a_hostile_header_is_refused_with_the_file_s_name(exported: Exported, damage: str) -> None:
    length, header = HEADERS[damage]
    claimed = len(header) if length is None else length
    (exported.out / "model.safetensors").write_bytes(claimed.to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(
        InvalidInput, match=r"training.init_from = 'out': model.safetensors cannot be read: "
    ) as refused:
        exported.keep()
    assert len(str(refused.value)) < 500


def test_weights_of_another_vocabulary_are_refused_with_the_tokenizer_to_use(exported: Exported) -> None:
    with pytest.raises(InvalidInput, match=r"has 257 ids, the weights have 301.*data.tokenizer = 'out/tokenizer.json'"):
        exported.keep(vocab_size=257)


def test_a_tokenizer_of_the_same_size_that_means_other_text_is_refused(exported: Exported) -> None:
    other = Tokenizer.train_bpe(["completely other words, learned from quite another text than theirs " * 9], 301).json
    with pytest.raises(InvalidInput, match=r"another than the weights' own tokenizer\.json"):
        exported.keep(tokenizer_json=other)


def test_tokens_imported_without_their_tokenizer_are_taken_at_their_word(exported: Exported) -> None:
    assert exported.keep(tokenizer_json=numbered_vocabulary(301, 300).json)


def test_a_shape_that_config_and_weights_disagree_on_is_refused(exported: Exported) -> None:
    tensors = load_file(exported.out / "model.safetensors")
    del tensors["transformer.h.1.ln_1.weight"]
    save_file(tensors, exported.out / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"training.init_from = 'out': missing weights: transformer.h.1.ln_1.weight"):
        exported.keep()
