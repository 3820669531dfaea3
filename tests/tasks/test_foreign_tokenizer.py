"""A tokenizer.json from elsewhere, as everything but tests loads it: by a file's name or its text."""

import json
from pathlib import Path

import pytest

from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput
from cairn.tasks.data.foreign_tokenizer import load_library_tokenizer, read_tokenizer
from tests.security.tokenizer_shapes import KNOWN


def test_a_file_that_is_not_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"mine\.json: not a tokenizer\.json"):
        read_tokenizer(tmp_path / "mine.json")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["absent", "no text"])
def test_a_file_that_cannot_be_read_is_refused_by_name(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "mine.json").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"mine\.json"):
        read_tokenizer(tmp_path / "mine.json")


def test_a_stored_file_is_the_tokenizer_it_was(tmp_path: Path) -> None:
    learned = Tokenizer.train_bpe(["to be or not to be"] * 9, 262)
    (tmp_path / "t.json").write_text(learned.to_json(), encoding="utf-8")
    assert read_tokenizer(tmp_path / "t.json").sha256 == learned.sha256


@pytest.mark.parametrize("name", KNOWN)
def test_the_child_that_tries_it_first_lets_every_known_shape_pass(name: str) -> None:
    text = json.dumps(KNOWN[name])
    assert load_library_tokenizer(text).to_str() == load_library_tokenizer(text).to_str()
