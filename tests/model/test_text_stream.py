"""Text that is shown while it is drawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from cairn.model.data.tokenizer import Tokenizer
from cairn.model.inference.prediction import TextStream

BYTES = Tokenizer.bytes()


def streamed(tokenizer, ids, after=()):
    stream = TextStream(tokenizer.decode, after)
    return [*(stream.push(token) for token in ids), stream.finish()]


@given(st.lists(st.integers(0, 256), max_size=40))
def test_whatever_the_bytes_the_pieces_joined_are_the_text_decoded_at_once(ids) -> None:
    assert "".join(streamed(BYTES, ids)) == BYTES.decode(ids)


@given(st.text(max_size=20), st.text(max_size=20))
def test_after_a_prompt_the_pieces_are_the_text_alone(prompt, text) -> None:
    after, ids = BYTES.encode_batch([prompt, text])
    assert "".join(streamed(BYTES, ids, after)) == text


@pytest.mark.parametrize("text", ["naïve", "€", "日本語", "🪨 stone", "e\u0301"])
def test_a_character_is_shown_whole_as_soon_as_its_last_byte_is_drawn(text) -> None:
    ids, pieces = list(text.encode()), [character for character in text]
    shown = streamed(BYTES, ids)
    assert [piece for piece in shown if piece] == pieces and shown[-1] == ""


def test_a_character_that_is_never_finished_is_shown_at_the_end() -> None:
    assert streamed(BYTES, [ord("a"), 0xE6, 0x97]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_byte_that_is_no_text_does_not_hold_back_what_follows() -> None:
    assert streamed(BYTES, [0xFF, ord("a"), ord("b")]) == ["", "\N{REPLACEMENT CHARACTER}a", "b", ""]


def test_spaces_between_tokens_are_kept_where_the_tokenizer_writes_them_only_between() -> None:
    library = Library(models.WordLevel({"</s>": 0, "▁a": 1, "▁b": 2, "c": 3}, unk_token="</s>"))
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library)
    assert "".join(streamed(tokenizer, [2, 3, 1], after=[1])) == " bc a"
    assert "".join(streamed(tokenizer, [2, 3, 1])) == tokenizer.decode([2, 3, 1]) == "bc a"
