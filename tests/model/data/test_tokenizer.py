"""Text to ids and back."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.model.data.tokenizer import END_OF_TEXT, Tokenizer
from cairn.model.data.tokenizer_file import load_tokenizer
from cairn.model.errors import InvalidInput
from tests.tasks.tokenizer_kinds import single_characters

TEXTS = [f"The {a} {b} sat on the {c}mat, didn't it?\n\n" for a in "abcdef" for b in ("cat", "dög") for c in "xyz"]
BPE = Tokenizer.train_bpe(TEXTS, 280)
BYTES = Tokenizer.bytes()
both = pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])


def loaded(text: str) -> Tokenizer:
    return Tokenizer(load_tokenizer(text))


@both
@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_every_text_comes_back_unchanged(tokenizer, text) -> None:
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


@both
@pytest.mark.parametrize(
    "text", ["", " x", "x ", "\r\n\t", "e\u0301 é", "\x00", "👩‍🚀", END_OF_TEXT, f"a{END_OF_TEXT}b"]
)
def test_awkward_texts_come_back_unchanged(tokenizer, text) -> None:
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


@both
def test_text_that_spells_the_marker_does_not_end_a_document(tokenizer) -> None:
    assert tokenizer.end_of_text_id not in tokenizer.encode_batch([f"a {END_OF_TEXT} b"])[0]


@both
def test_a_tokenizer_survives_its_own_json(tokenizer) -> None:
    again = loaded(tokenizer.json)
    assert again.sha256 == tokenizer.sha256
    assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert again.encode_batch([END_OF_TEXT]) == tokenizer.encode_batch([END_OF_TEXT])


def test_equal_texts_give_equal_tokenizers() -> None:
    assert len({Tokenizer.train_bpe(iter(TEXTS), 280).sha256 for _ in range(4)}) == 1


def test_the_order_of_texts_does_not_matter() -> None:
    texts = [f"{text} {number}" for number, text in enumerate(TEXTS * 5)]
    one, other = Tokenizer.train_bpe(texts, 450), Tokenizer.train_bpe(texts[::-1], 450)
    assert one.sha256 == other.sha256


@both
def test_concatenated_ids_are_the_ids_of_each_text(tokenizer) -> None:
    ids, lengths = tokenizer.encode_flat([*TEXTS, "", END_OF_TEXT])
    apart = tokenizer.encode_batch([*TEXTS, "", END_OF_TEXT])
    assert ids.tolist() == [*itertools.chain(*apart)] and lengths.tolist() == [len(item) for item in apart]


def test_the_vocabulary_has_the_size_asked_for() -> None:
    assert (BPE.vocab_size, BYTES.vocab_size) == (280, 257)


def test_byte_ids_are_bytes() -> None:
    text = "héllo\n"
    assert BYTES.encode_batch([text])[0] == list(text.encode()) and BYTES.end_of_text_id == 256


def test_a_learned_tokenizer_needs_fewer_tokens_than_bytes() -> None:
    assert len(BPE.encode_batch(TEXTS[:1])[0]) < len(TEXTS[0].encode()) / 2


def test_a_batch_keeps_its_order() -> None:
    assert BYTES.encode_batch(["a", "", "bc"]) == [[97], [], [98, 99]]


def test_ids_that_are_not_text_still_decode() -> None:
    assert BYTES.decode([0xFF, 97]) == "\N{REPLACEMENT CHARACTER}a"


def test_a_vocabulary_too_big_for_the_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="vocab_size=5000 is too big"):
        Tokenizer.train_bpe(TEXTS, 5000)


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(InvalidInput, match="vocab_size=256 must be at least 257"):
        Tokenizer.train_bpe(TEXTS, 256)


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    content = json.loads(BYTES.json)
    content["added_tokens"] = []
    with pytest.raises(InvalidInput, match="no end-of-text token"):
        loaded(json.dumps(content))


def test_a_prompt_that_a_tokenizer_cannot_encode_begins_a_new_text() -> None:
    tokenizer = loaded(json.dumps(single_characters()))
    assert tokenizer.encode_prompt("\N{MOUNTAIN}") == [tokenizer.end_of_text_id]


@pytest.mark.parametrize("size", [1024, 1025, 64 * 1024])
def test_text_without_spaces_is_learned_from_in_pieces_of_a_thousand_letters(size: int) -> None:
    """As one pretoken a quarter of a megabyte would take half a minute: its time is quadratic."""
    with pytest.raises(InvalidInput, match="too big for this text, which yields 267"):
        Tokenizer.train_bpe(["a" * size], 300)
    longest = Tokenizer.train_bpe(["a" * size], 267).encode_batch(["a" * 4096])[0]
    assert len(longest) == 4
