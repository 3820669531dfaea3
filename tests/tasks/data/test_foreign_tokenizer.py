"""A tokenizer.json from elsewhere, as everything but tests loads it: by a file's name or its text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput
from cairn.tasks.data.foreign_tokenizer import load_library_tokenizer, read_tokenizer
from tests.security.tokenizer_shapes import KNOWN
from tests.tasks.tokenizer_kinds import learned, wordlevel

pytestmark = pytest.mark.usefixtures("forked_parsers")


@pytest.mark.parametrize("text", ["{}", "null", "[]", '"bpe"', '{"model": null}', '{"model": {"type": "BPE"}}'])
def test_a_file_that_is_not_a_tokenizer_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"mine\.json: tokenizer\.json: it has no model with a vocabulary; rule"):
        read_tokenizer(tmp_path / "mine.json")


@pytest.mark.parametrize("make", [learned, wordlevel])
def test_an_id_of_two_tokens_is_refused(make: Callable[[], dict[str, Any]]) -> None:
    """The library keeps one of the two by chance, so every build would have a snapshot of its own."""
    made = make()
    made["model"]["vocab"]["another"] = 5
    with pytest.raises(InvalidInput, match="vocab gives an id to two tokens; rule: each token has its own id"):
        load_library_tokenizer(json.dumps(made))


def test_a_byte_order_mark_is_no_part_of_a_tokenizer(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / f"{encoding}.json").write_text(json.dumps(learned()), encoding=encoding)
    plain, marked = (read_tokenizer(tmp_path / f"{encoding}.json") for encoding in ("utf-8", "utf-8-sig"))
    assert plain.sha256 == marked.sha256


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["absent", "no text"])
def test_a_file_that_cannot_be_read_is_refused_by_name(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "mine.json").write_bytes(content)
    with pytest.raises(InvalidInput, match=r"mine\.json"):
        read_tokenizer(tmp_path / "mine.json")


def test_a_stored_file_is_the_tokenizer_it_was(tmp_path: Path) -> None:
    learned = Tokenizer.train_bpe(["to be or not to be"] * 9, 262)
    (tmp_path / "t.json").write_text(learned.json, encoding="utf-8")
    assert read_tokenizer(tmp_path / "t.json").sha256 == learned.sha256


@pytest.mark.parametrize("name", KNOWN)
def test_the_child_that_tries_it_first_lets_every_known_shape_pass(name: str) -> None:
    text = json.dumps(KNOWN[name])
    assert load_library_tokenizer(text).to_str() == load_library_tokenizer(text).to_str()
