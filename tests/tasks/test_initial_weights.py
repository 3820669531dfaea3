"""A run that begins from weights: read once, kept by hash, the same bits wherever and however often it starts."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.token_import import numbered_vocabulary
from cairn.tasks.evaluator.checkpoint_model import open_model, write_model_directory
from cairn.tasks.trainer.initial_weights import InitialDirectory, keep_initial_weights, read_initial_weights
from cairn.tasks.trainer.trainer import Trainer
from cairn.tasks.trainer.trainer_channel import ParentChannel, Place
from cairn.tasks.trainer.trainer_protocol import Event, Ready, TrainerSpec
from tests.tasks.committed_model import CommittedModel, commit_model, small_configuration


@pytest.fixture
def model(store: LocalStore, tmp_path: Path) -> CommittedModel:
    """A committed model that lies in `out` as a directory."""
    model = commit_model(store, tmp_path, small_configuration())
    opened = open_model(
        store,
        model.reference,
        model=model.config.model,
        snapshot_id=snapshot_id(model),
        cache_dir=tmp_path / "cache",
        device=torch.device("cpu"),
    )
    write_model_directory(tmp_path / "out", opened, card="")
    return model


def snapshot_id(model: CommittedModel) -> str:
    opened = model.log.state.opened
    assert opened is not None
    return opened.data_snapshot


def keep(store: LocalStore, model: CommittedModel, folder: Path, **changes: Any) -> str:
    """Keep the weights of `out` for a run on the model's own snapshot."""
    snapshot = open_snapshot(store, snapshot_id(model), folder / "cache")
    wanted: dict[str, Any] = {
        "tokenizer_json": snapshot.tokenizer_json,
        "vocab_size": snapshot.manifest.vocab_size,
        "model": model.config.model,
        **changes,
    }
    kept = keep_initial_weights(store, InitialDirectory("out", folder), wanted.pop("model"), **wanted)
    return kept.weights_sha256


def altered(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite the directory's weights."""
    path = folder / "out" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


class Heard(ParentChannel):
    """A channel that keeps its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, event: Event) -> None:
        self.events.append(event)


def train(store: LocalStore, model: CommittedModel, sha256: str | None, place: Path) -> tuple[Trainer, Heard]:
    """Start a trainer at step 0 on a machine whose files lie in `place`."""
    config = small_configuration(model={"dropout": 0.1}, init_from="out", probe_every_steps=0)
    spec = TrainerSpec(
        run_id="begun",
        attempt=1,
        store_url=store.url,
        snapshot_id=snapshot_id(model),
        data=config.data,
        model=config.model,
        training=config.training,
        micro_batch=2,
        activation_checkpointing=False,
        quarantined=(),
        divergence=config.divergence,
        patience_seconds=1.0,
        threads=1,
        workers=1,
        devices=1,
        resume=None,
        initial_weights_sha256=sha256,
        cache_dir=place / "cache",
        work_dir=place / "work",
        prompt="",
        faults="",
    )
    channel = Heard()
    trainer = Trainer(spec, channel, threading.Event(), Place(device=torch.device("cpu")))
    trainer.resume()
    return trainer, channel


def leave(trainer: Trainer) -> None:
    """End as its process would, which closes its files by ending."""
    trainer.finish()
    trainer._reporter._log._file.close()


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer._state.model.named_parameters()}


def test_step_0_has_exactly_the_exported_weights(store: LocalStore, model: CommittedModel, tmp_path: Path) -> None:
    trainer, channel = train(store, model, keep(store, model, tmp_path), tmp_path / "here")
    assert isinstance(channel.events[0], Ready) and channel.events[0].step == 0
    begun, exported = weights_of(trainer), dict(model.state.model.named_parameters())
    assert begun.keys() == exported.keys() and all(begun[name].equal(exported[name]) for name in begun)
    leave(trainer)


def test_killed_before_its_first_commit_it_begins_elsewhere_with_the_same_bits(
    store: LocalStore, model: CommittedModel, tmp_path: Path
) -> None:
    sha256 = keep(store, model, tmp_path)
    killed, _ = train(store, model, sha256, tmp_path / "here")
    killed.train_segment(2)  # staged, never committed
    leave(killed)
    shutil.rmtree(tmp_path / "out")
    digests = []
    for place in ("there", "elsewhere"):
        trainer, channel = train(store, model, sha256, tmp_path / place)
        trainer.train_segment(4)
        leave(trainer)
        digests.append([event.state_sha256 for event in channel.events if isinstance(event, StagedCheckpoint)])
    assert len(digests[0]) == 1 and digests[0] == digests[1]


def test_a_run_that_names_no_weights_draws_its_own(store: LocalStore, model: CommittedModel, tmp_path: Path) -> None:
    trainer, _ = train(store, model, None, tmp_path / "here")
    assert not weights_of(trainer)["wte.weight"].equal(model.state.model.wte.weight)
    leave(trainer)


def test_equal_weights_are_kept_once_and_read_back(store: LocalStore, model: CommittedModel, tmp_path: Path) -> None:
    first, second = keep(store, model, tmp_path), keep(store, model, tmp_path)
    names = [key for key in store.keys("initial") if key.endswith("weights.safetensors")]
    assert first == second and names == [f"initial/{first}/weights.safetensors"]
    kept = read_initial_weights(store, first)
    assert all(
        torch.from_numpy(kept[name]).equal(parameter) for name, parameter in model.state.model.named_parameters()
    )


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_kept_weights_that_do_not_verify_are_not_used_and_can_be_kept_again(
    store: LocalStore, model: CommittedModel, tmp_path: Path, damage: str
) -> None:
    sha256 = keep(store, model, tmp_path)
    key = f"initial/{sha256}/weights.safetensors"
    store.write(key, store.read(key)[:-1] + b"?") if damage == "flipped" else store.delete(key)
    with pytest.raises(IntegrityError, match=key):
        read_initial_weights(store, sha256)
    assert keep(store, model, tmp_path) == sha256
    assert read_initial_weights(store, sha256)


def test_weights_in_shards_and_in_bfloat16_are_read(store: LocalStore, model: CommittedModel, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    halves = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    names = {}
    for number in range(2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = dict(list(halves.items())[number::2])
        save_file(part, folder / file)
        names |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    kept = torch.from_numpy(read_initial_weights(store, keep(store, model, tmp_path))["wte.weight"])
    assert kept.equal(model.state.model.wte.weight.detach().bfloat16().float()) and kept.dtype == torch.float32


def test_a_pickle_is_refused_by_name(store: LocalStore, model: CommittedModel, tmp_path: Path) -> None:
    (tmp_path / "out" / "model.safetensors").rename(tmp_path / "out" / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match=r"training.init_from = 'out': pytorch_model.bin is a pickle"):
        keep(store, model, tmp_path)


def _header(dtype: str, shape: list[int], begin: int = 0) -> bytes:
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + 4]}
    return json.dumps({"transformer.wte.weight": tensor}).encode()


@pytest.mark.parametrize("name", ["../out/model.safetensors", "absent.safetensors", "model.bin"])
def test_an_index_may_only_name_files_beside_it(
    store: LocalStore, model: CommittedModel, tmp_path: Path, name: str
) -> None:
    (tmp_path / "out" / "model.safetensors").unlink()
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InvalidInput, match=r"index\.json"):
        keep(store, model, tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_torn_is_named(store: LocalStore, model: CommittedModel, tmp_path: Path, file: str) -> None:
    path = tmp_path / "out" / file
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InvalidInput, match=rf"training.init_from = 'out': {file}"):
        keep(store, model, tmp_path)


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
def test_a_hostile_header_is_refused_with_the_file_s_name(
    store: LocalStore, model: CommittedModel, tmp_path: Path, damage: str
) -> None:
    length, header = HEADERS[damage]
    claimed = len(header) if length is None else length
    (tmp_path / "out" / "model.safetensors").write_bytes(claimed.to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(
        InvalidInput, match=r"training.init_from = 'out': model.safetensors cannot be read: "
    ) as refused:
        keep(store, model, tmp_path)
    assert len(str(refused.value)) < 500


def test_weights_of_another_vocabulary_are_refused_with_the_tokenizer_to_use(
    store: LocalStore, model: CommittedModel, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=r"has 257 ids, the weights have 301.*data.tokenizer = 'out/tokenizer.json'"):
        keep(store, model, tmp_path, vocab_size=257)


def test_a_tokenizer_of_the_same_size_that_means_other_text_is_refused(
    store: LocalStore, model: CommittedModel, tmp_path: Path
) -> None:
    other = Tokenizer.train_bpe(["completely other words, learned from quite another text than theirs " * 9], 301).json
    with pytest.raises(InvalidInput, match=r"another than the weights' own tokenizer\.json"):
        keep(store, model, tmp_path, tokenizer_json=other)


def test_tokens_imported_without_their_tokenizer_are_taken_at_their_word(
    store: LocalStore, model: CommittedModel, tmp_path: Path
) -> None:
    assert keep(store, model, tmp_path, tokenizer_json=numbered_vocabulary(301, 300).json)


def test_a_shape_that_config_and_weights_disagree_on_is_refused(
    store: LocalStore, model: CommittedModel, tmp_path: Path
) -> None:
    altered(tmp_path, lambda records: records.pop("transformer.h.1.ln_1.weight"))
    with pytest.raises(InvalidInput, match=r"training.init_from = 'out': missing weights: transformer.h.1.ln_1.weight"):
        keep(store, model, tmp_path)
