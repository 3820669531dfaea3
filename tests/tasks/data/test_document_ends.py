"""Which token ends a document, for a build and for every later reader.

No document ends itself, whatever its text spells and whichever accepted tokenizer encodes it.
"""

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
from cairn.storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from cairn.tasks.data import snapshot_writer
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.foreign_tokenizer import parse_tokenizer
from cairn.tasks.data.snapshot_lookup import make_recipe
from cairn.tasks.data.token_import import given_tokenizer, import_tokens, numbered_vocabulary
from tests.memory_store import MemoryStore
from tests.security.tokenizer_shapes import BYTE_LEVEL
from tests.tasks.committed_model import commit_model, small_configuration
from tests.tasks.corpus_files import build_with
from tests.tasks.tokenizer_kinds import FLAGS, KINDS, PARAGRAPHS, learned, llama2, llama3, unigram, wordlevel, wordpiece

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


MARKERS = {
    "DeepSeek's": "<\N{FULLWIDTH VERTICAL LINE}end\u2581of\u2581sentence\N{FULLWIDTH VERTICAL LINE}>",
    "Claude's": "<EOT>",
    "nanochat's": "<|bos|>",
}


def built(folder: Path, tokenizer: dict[str, Any], **settings: str) -> OpenSnapshot:
    spelled, store = "".join(MARKERS.values()), MemoryStore()
    reference = build_with(tokenizer, folder, store, [f"{text} {spelled}" for text in PARAGRAPHS], **settings)
    return open_snapshot(store, reference.snapshot_id, folder / "cache")


@pytest.mark.parametrize("marker", MARKERS.values(), ids=MARKERS)
def test_a_named_token_ends_each_document_and_nothing_else(marker: str, tmp_path: Path) -> None:
    snapshot = built(tmp_path, learned(marker), end_of_text=marker)
    end, tokens = snapshot.manifest.end_of_text_id, np.concatenate([*snapshot.train, *snapshot.val])
    assert parse_tokenizer(snapshot.tokenizer_json, end).end_of_text == marker
    assert (int((tokens == end).sum()), int(tokens[-1])) == (60, end)


@pytest.mark.parametrize("marker", MARKERS.values(), ids=MARKERS)
def test_a_tokenizer_whose_end_is_not_known_is_refused_with_its_special_tokens(marker: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidCorpus, match=r"no end-of-text token, .*data.end_of_text names .*tokens: ") as refusal:
        built(tmp_path, learned(marker))
    assert repr(marker) in str(refusal.value)


def with_two_ends() -> dict[str, Any]:
    made = learned()
    made["added_tokens"].append({"id": 330, "content": "<EOT>", "special": True, **FLAGS})
    return made


def test_a_named_token_goes_before_a_known_one(tmp_path: Path) -> None:
    assert built(tmp_path, with_two_ends(), end_of_text="<EOT>").manifest.end_of_text_id == 330


def test_a_named_token_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCorpus, match=r"data.tokenizer = 't.json': .*looked for <EOT>; rule: data.end_of_text"):
        built(tmp_path, wordlevel(), end_of_text="<EOT>")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_tokenizer_that_is_made_here_has_its_own_end(tokenizer: str) -> None:
    with pytest.raises(ValueError, match=f"end_of_text: {tokenizer} has its own end of text"):
        DataConfig(sources=("a.txt",), tokenizer=tokenizer, end_of_text="<EOT>")


def files_of(folder: Path, *parts: list[int]) -> dict[str, tuple[Path, ...]]:
    for name, ids in zip(("train", "val"), parts, strict=True):
        np.array(ids, dtype="<u2").tofile(folder / f"{name}.bin")
    return {name: (folder / f"{name}.bin",) for name in ("train", "val")}


def test_the_greatest_of_numbers_is_not_taken_for_an_end_that_nobody_named(tmp_path: Path) -> None:
    files, meaning = files_of(tmp_path, [1, 64, 2, 3], [4, 5, 6]), given_tokenizer("", 65, -1)
    remedy = r"train\.bin: token 1 is 64, .*Add --end-of-text 64 if it does, or take --vocab-size 66"
    with pytest.raises(InvalidCorpus, match=remedy):
        import_tokens(MemoryStore(), files, meaning, assumes_end=True)


def test_ids_without_an_end_keep_their_greatest_beside_one_more(tmp_path: Path) -> None:
    files, meaning = files_of(tmp_path, [1, 64, 2, 3], [4, 5, 6]), given_tokenizer("", 66, -1)
    made = import_tokens(MemoryStore(), files, meaning, assumes_end=True).manifest
    assert (made.splits.train.documents, made.splits.train.tokens, made.end_of_text_id) == (1, 4, 65)


def test_tokens_of_a_tokenizer_end_with_the_id_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(learned("<|bos|>")), encoding="utf-8")
    meaning = given_tokenizer(str(tmp_path / "t.json"), 0, 0)
    made = import_tokens(MemoryStore(), files_of(tmp_path, [65, 66, 0, 67, 68, 0], [70, 71]), meaning).manifest
    assert (meaning.end_of_text, made.splits.train.documents) == ("<|bos|>", 2)


def test_an_end_beyond_a_tokenizers_ids_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(learned()), encoding="utf-8")
    with pytest.raises(InvalidCorpus, match="--end-of-text 330: must lie in 0 to 329"):
        given_tokenizer(str(tmp_path / "t.json"), 0, 330)


def test_numbers_end_with_the_one_that_is_named() -> None:
    assert numbered_vocabulary(65, 3).end_of_text_id == 3


def test_a_model_is_read_with_the_end_of_text_that_it_was_trained_with(tmp_path: Path) -> None:
    """The tokenizer has a known end as well, which a reader of the tokenizer alone would take."""
    (tmp_path / "t.json").write_text(json.dumps(with_two_ends()), encoding="utf-8")
    config = small_configuration(data={"tokenizer": "t.json", "end_of_text": "<EOT>"})
    model = commit_model(MemoryStore(), tmp_path, config).open(tmp_path)
    assert model.tokenizer.encode_prompt("") == [330]
