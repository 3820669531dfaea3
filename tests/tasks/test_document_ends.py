"""No document ends itself, whatever its text spells and whichever accepted tokenizer encodes it."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.model.configuration.data import DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.data.tokenizer_file import load_tokenizer
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.tasks.data import snapshot_writer
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.snapshot_lookup import make_recipe
from tests.memory_store import MemoryStore
from tests.security.tokenizer_shapes import BYTE_LEVEL
from tests.tasks.corpus_files import build_with
from tests.tasks.tokenizer_kinds import KINDS, PARAGRAPHS, learned, llama2, llama3, unigram, wordlevel, wordpiece

pytestmark = pytest.mark.usefixtures("forked_parsers")

SPLIT_AT_SPACES = {"type": "WhitespaceSplit"}
SURROUNDINGS = ("{}", "up {} up", "up{}up", "\n{}\n", "{0}{0}", "so {} said\n{}", "walkers said so {}.")


def not_special(made: dict[str, Any]) -> dict[str, Any]:
    return {**made, "added_tokens": [{**token, "special": False} for token in made["added_tokens"]]}


def with_merges(made: dict[str, Any], end: str) -> dict[str, Any]:
    """Return one that merges the letters of its end of text, and a letter more, when they are one pretoken."""
    whole = [(end[:size], end[size]) for size in range(1, len(end))] + [(end, "s")]
    vocabulary = dict(made["model"]["vocab"])
    for one, other in whole:
        vocabulary.setdefault(one + other, len(vocabulary))
    model = {**made["model"], "vocab": vocabulary, "merges": [*map(list, whole), *made["model"]["merges"]]}
    return {**made, "model": model, "pre_tokenizer": {**BYTE_LEVEL, "use_regex": False}}


ACCEPTED: dict[str, Callable[[], dict[str, Any]]] = {
    **KINDS,
    "a WordPiece split at spaces": lambda: {**wordpiece(), "normalizer": None, "pre_tokenizer": SPLIT_AT_SPACES},
    "a WordLevel in small letters": lambda: {**wordlevel(), "normalizer": {"type": "Lowercase"}},
    "a BPE that takes a word whole": lambda: {**llama3(), "pre_tokenizer": {**BYTE_LEVEL, "use_regex": False}},
    "an end that is not special": lambda: not_special(learned()),
    "Llama 2 with an end that is not special": lambda: not_special(llama2()),
    "a Unigram with an end that is not special": lambda: not_special(unigram()),
    "an end in the vocabulary alone": lambda: {**unigram(), "added_tokens": []},
    "merges that spell the end": lambda: with_merges(learned(), "<|endoftext|>"),
}
ENCODABLE = [kind for kind in ACCEPTED if kind != "single characters"]
LOSSLESS = ("a byte-level BPE", "Llama 3", "an end that is not special", "merges that spell the end", "Gemma")


@functools.cache
def loaded(kind: str) -> Tokenizer:
    return Tokenizer(load_tokenizer(json.dumps(ACCEPTED[kind]())))


@pytest.mark.parametrize("kind", ENCODABLE)
def test_text_that_spells_the_end_ends_no_document(kind: str) -> None:
    tokenizer = loaded(kind)
    spelled = (tokenizer.end_of_text, tokenizer.end_of_text.upper())
    texts = [around.format(end, end) for around in SURROUNDINGS for end in spelled]
    ids, lengths = tokenizer.encode_flat(texts)
    assert tokenizer.end_of_text_id not in ids and len(ids) == lengths.sum()


@pytest.mark.parametrize("kind", LOSSLESS)
def test_text_that_spells_the_end_comes_back_unchanged(kind: str) -> None:
    tokenizer = loaded(kind)
    texts = [around.format(tokenizer.end_of_text, tokenizer.end_of_text) for around in SURROUNDINGS]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


@pytest.mark.parametrize("kind", ENCODABLE)
def test_texts_beside_one_that_spells_the_end_keep_their_ids(kind: str) -> None:
    tokenizer = loaded(kind)
    (alone, _), end = tokenizer.encode_flat(PARAGRAPHS[:2]), tokenizer.encode_batch([tokenizer.end_of_text])[0]
    beside, lengths = tokenizer.encode_flat([PARAGRAPHS[0], tokenizer.end_of_text, PARAGRAPHS[1]])
    first, last = lengths[0], lengths[0] + lengths[1]
    assert beside[first:last].tolist() == end
    assert np.concatenate([beside[:first], beside[last:]]).tolist() == alone.tolist()


@pytest.mark.parametrize("kind", ENCODABLE)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_no_mixture_of_an_ends_parts_ends_a_document(kind: str, data: st.DataObject) -> None:
    end = loaded(kind).end_of_text
    parts = (end, end[:-1], end[1:], end[:3], end[-3:], end.upper(), *" \n<>|/[]_sé", "stone", "\N{ZERO WIDTH JOINER}")
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    ids, lengths = loaded(kind).encode_flat([text])
    unknown = loaded(kind).count_unknown([text], ids, lengths)
    assert loaded(kind).end_of_text_id not in ids and 0 <= unknown[0] <= len(text.encode())


def test_a_unigram_spells_its_end_in_letters() -> None:
    tokenizer = loaded("a Unigram")
    assert tokenizer.decode(tokenizer.encode_batch(["so </s> said"])[0]) == "so </s> said"


def ended(folder: Path, kind: str, texts: list[str]) -> tuple[int, int]:
    """Return the documents and the end marks of a snapshot of these texts."""
    store = MemoryStore()
    reference = build_with(ACCEPTED[kind](), folder, store, texts, max_rejected_fraction=0.5)
    opened, splits = open_snapshot(store, reference.snapshot_id, folder / "cache"), reference.manifest.splits
    tokens = np.concatenate([*opened.train, *opened.val])
    marks = int((tokens == reference.manifest.end_of_text_id).sum())
    return splits.train.documents + splits.val.documents, marks


@pytest.mark.parametrize("kind", ["a Unigram", "a WordLevel", "an end that is not special"])
def test_a_snapshot_has_as_many_end_marks_as_documents(kind: str, tmp_path: Path) -> None:
    end = loaded(kind).end_of_text
    assert ended(tmp_path, kind, [f"{text} {end} {number}" for number, text in enumerate(PARAGRAPHS)]) == (60, 60)


@pytest.mark.parametrize(("kind", "is_new"), [("a Unigram", True), ("a WordLevel", True), ("Llama 3", False)])
def test_a_snapshot_whose_documents_ended_themselves_is_not_taken(kind: str, is_new: bool) -> None:
    """Older versions recorded recipes for the same tokenizers, which give another snapshot now."""
    tokenizer = Tokenizer(load_tokenizer(json.dumps(ACCEPTED[kind]())))
    tokenizer.require_ends_kept()
    recipe = make_recipe(DataConfig(sources=("a.txt",), tokenizer="t.json"), (), tokenizer)
    assert ("spells_end" in recipe) is is_new


def test_an_unknown_token_that_is_the_end_is_refused_at_load(tmp_path: Path) -> None:
    model = {**wordlevel()["model"], "unk_token": "<eos>"}
    with pytest.raises(InvalidCorpus, match=r"data.tokenizer = 't.json': .*does not know.* becomes '<eos>'"):
        build_with({**wordlevel(), "model": model}, tmp_path, MemoryStore(), PARAGRAPHS)


def test_a_text_that_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCorpus, match=r"a\.jsonl, offset \d{4}: the tokenizer cannot encode .*UNK"):
        ended(tmp_path, "single characters", [*PARAGRAPHS, "another \N{MOUNTAIN}"])


def test_a_part_with_a_mark_too_many_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: Tokenizer, texts: list[str]) -> tuple[Any, Any]:
        return np.full(2 * len(texts), self.end_of_text_id, dtype=np.uint32), np.full(len(texts), 2)

    monkeypatch.setattr(Tokenizer, "encode_flat", encode)
    monkeypatch.setattr(snapshot_writer, "WORKERS", 1)
    with pytest.raises(InvalidCorpus, match=r"a\.jsonl: 180 end marks for 60 documents"):
        ended(tmp_path, "a Unigram", list(PARAGRAPHS))
