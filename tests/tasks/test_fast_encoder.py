"""Equal ids whichever library encodes: the fast one is taken only where a probe and the text's own sample agree."""

import json
import sys
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from cairn.model.data import tokenizer
from cairn.model.data.tokenizer import FlatIds, Tokenizer, choose_encoder
from cairn.tasks.data.encoding_process import FastEncoder
from tests.full_amount import FULL
from tests.tasks.tokenizer_kinds import KINDS, TEXTS

FEW_CHARACTERS = ("é x", "漢字 漢1")


@pytest.fixture(autouse=True)
def few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_every_character", lambda: iter([FEW_CHARACTERS]))


@cache
def both(kind: str) -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizer of a kind by the reference alone, and with what the probe chose."""
    document = json.dumps(KINDS[kind]())
    plain, chosen = (Tokenizer(LibraryTokenizer.from_str(document)) for _ in range(2))
    chosen.accelerate(TEXTS, FastEncoder)
    return plain, chosen


TEXT = st.text(max_size=60) | st.lists(st.sampled_from([*TEXTS, " ", "\n", "</s>", "<|endoftext|>", "7"])).map("".join)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=50 if FULL else 20)
@given(texts=st.lists(TEXT, max_size=4))
def test_every_accepted_kind_has_equal_ids_whichever_library_encodes(kind: str, texts: list[str]) -> None:
    plain, chosen = both(kind)
    expected, found = (_outcome(tokenizer, texts) for tokenizer in (plain, chosen))
    assert expected == found


def _outcome(tokenizer: Tokenizer, texts: Sequence[str]) -> object:
    try:
        ids, lengths = tokenizer.encode_flat(texts)
    except Exception as error:
        return type(error), str(error)
    return ids.tolist(), lengths.tolist()


def test_our_own_tokenizers_are_encoded_fast() -> None:
    assert Tokenizer.bytes().accelerate(TEXTS, FastEncoder) and Tokenizer.train_bpe(TEXTS, 300).accelerate(
        TEXTS, FastEncoder
    )


def reference(texts: Sequence[str]) -> FlatIds:
    return FastEncoder(Tokenizer.bytes().json).encode_flat(texts)


@pytest.mark.parametrize("differs", ["漢字 漢1", "of the sample"])
def test_one_other_id_anywhere_leaves_the_reference_in_its_place(differs: str) -> None:
    def other(texts: Sequence[str]) -> FlatIds:
        ids, lengths = reference(texts)
        return (ids + 1 if differs in texts else ids), lengths

    assert choose_encoder(Tokenizer.bytes().json, reference, ["of the sample"], FastEncoder) is not None
    assert choose_encoder(Tokenizer.bytes().json, other, ["of the sample"], FastEncoder) is None


def test_a_tokenizer_that_the_library_cannot_read_stays_with_the_reference() -> None:
    assert choose_encoder("{}", reference, [], FastEncoder) is None


def test_without_the_library_the_reference_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert not Tokenizer.bytes().accelerate(TEXTS, FastEncoder)


@pytest.mark.slow
def test_every_assigned_character_has_equal_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for kind in KINDS:
        tokenizer = Tokenizer(LibraryTokenizer.from_str(json.dumps(KINDS[kind]())))
        print(kind, tokenizer.accelerate(TEXTS, FastEncoder))
    assert Tokenizer.train_bpe(TEXTS, 300).accelerate(TEXTS, FastEncoder)


def test_ids_are_one_flat_array() -> None:
    ids, lengths = reference(["ab", "", "c"])
    assert ids.dtype == np.uint32 and ids.tolist() == [97, 98, 99] and lengths.tolist() == [2, 0, 1]
