"""Foreign files, changed a little: each is read or refused in words, and nothing else is raised.

The default suite tries a hundred of each, `make test-slow` twenty thousand. Entries of a log and all other documents of
a store: tests/storage/test_parser_fuzz.py.
"""

import json
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from cairn.model.configuration.network import ModelConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.data.tokenizer_file import load_tokenizer
from cairn.model.errors import InvalidInput
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.trainer.initial_weights import InitialDirectory, keep_initial_weights
from tests.cairn.hostile_store import change, places
from tests.security.tokenizer_shapes import KNOWN

MODEL = ModelConfig(n_layer=1, n_head=1, n_embd=2, block_size=2)
GPT2 = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 2, "n_embd": 2, "n_layer": 1, "n_head": 1, "n_inner": 8}
LLAMA = {"model_type": "llama", "vocab_size": 257, "hidden_size": 2, "num_attention_heads": 1, "head_dim": 2}
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 1e308, 0.5, "", "\ud800", "a" * 3000, "\0", "F32", "BF16"),
    *([], {}, [[]], [0], [1, 2], [2**62, 2], {"a": 1}, "(a+)+$", {"type": "Sequence"}, {"Regex": "["}),
)
TENSORS = {
    f"transformer.{name}": np.zeros(shape, np.float32)
    for name, shape in {"wte.weight": (257, 2), "wpe.weight": (2, 2), "ln_f.weight": (2,), "ln_f.bias": (2,)}.items()
}


def changed(document: Any, chance: random.Random) -> bytes:
    """Return a document as JSON with up to three places or bytes changed."""
    document = deepcopy(document)
    for _ in range(chance.randint(1, 3)):
        if place := chance.choice([(), *places(document)]):
            change(document, place, ... if chance.random() < 0.3 else deepcopy(chance.choice(VALUES)))
    data = bytearray(json.dumps(document).encode())
    for _ in range(chance.choice((0, 0, 0, 1, 4))):
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
    return bytes(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.05 else data)


def a_configuration(chance: random.Random, folder: Path) -> None:
    (folder / "config.json").write_bytes(changed(chance.choice((GPT2, LLAMA)), chance))
    (folder / "model.safetensors").write_bytes(save(TENSORS))
    keep(folder)


def some_weights(chance: random.Random, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(GPT2))
    whole = save(TENSORS)
    length = int.from_bytes(whole[:8], "little")
    header = changed(json.loads(whole[8 : 8 + length]), chance)
    claimed = chance.choice((len(header), len(header), len(header), 0, 2**63, len(header) + 1, length))
    (folder / "model.safetensors").write_bytes(claimed.to_bytes(8, "little") + header + whole[8 + length :])
    keep(folder)


def keep(folder: Path) -> None:
    text = Tokenizer.bytes().json
    directory = InitialDirectory(str(folder), folder)
    keep_initial_weights(LocalStore(folder / "store"), directory, MODEL, tokenizer_json=text, vocab_size=257)


def a_tokenizer(chance: random.Random, folder: Path) -> None:
    load_tokenizer(changed(KNOWN[chance.choice(sorted(KNOWN))], chance).decode("utf-8", "replace"))


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    "a config.json": a_configuration,
    "a header of safetensors": some_weights,
    "a tokenizer.json": a_tokenizer,
}


def try_files(kind: str, folder: Path, cases: int) -> None:
    refused = 0
    for seed in range(cases):
        try:
            KINDS[kind](random.Random(f"{kind} {seed}"), folder)
        except InvalidInput as error:
            refused += 1
            assert len(str(error)) < 5000, seed
        except BaseException as error:
            raise AssertionError(f"{kind}, seed {seed}: {type(error).__name__}") from error
    assert refused > cases / 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_changed_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    try_files(kind, tmp_path, 100)


@pytest.mark.slow  # quick witness: the one above
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_thousand_files_that_were_changed_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    try_files(kind, tmp_path, 20_000)
