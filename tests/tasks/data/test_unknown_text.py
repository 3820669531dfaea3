"""Text that a tokenizer does not know is counted, said, and refused above a share; chance is turned off."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.data import tokenizer
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.data.tokenizer_file import load_tokenizer
from cairn.tasks.data import snapshot_writer
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.snapshot_lookup import SnapshotReference
from tests.memory_store import MemoryStore
from tests.tasks.corpus_files import build_with
from tests.tasks.tokenizer_kinds import (
    KINDS,
    PARAGRAPHS,
    learned,
    llama2,
    merged_characters,
    sentencepiece_bpe,
    unigram,
    wordlevel,
)

pytestmark = pytest.mark.usefixtures("forked_parsers")

WHOLE = ("a byte-level BPE", "Llama 3", "Llama 2", "Mistral", "Gemma")
LOSING = [kind for kind in KINDS if kind not in (*WHOLE, "single characters")]
FOREIGN = "\N{MOUNTAIN} \N{SNOWMAN} q"


def loaded(document: dict[str, Any]) -> Tokenizer:
    return Tokenizer(load_tokenizer(json.dumps(document)))


def unknown_in(library: Tokenizer, *texts: str) -> list[int]:
    return library.count_unknown(texts, *library.encode_flat(texts)).tolist()


@pytest.mark.parametrize("kind", LOSING)
def test_what_a_tokenizer_does_not_know_is_counted_in_each_text(kind: str) -> None:
    library = loaded(KINDS[kind]())
    counted = unknown_in(library, PARAGRAPHS[0], f"stone {FOREIGN} stone", PARAGRAPHS[1])
    assert counted in ([0, 7, 0], [0, 6, 0])  # a WordPiece splits its letters


@pytest.mark.parametrize("kind", WHOLE)
def test_a_tokenizer_that_falls_back_to_bytes_knows_everything(kind: str) -> None:
    assert unknown_in(loaded(KINDS[kind]()), FOREIGN, "\x00\x85\N{ZERO WIDTH JOINER}", chr(0x10FFFD)) == [0, 0, 0]


@pytest.mark.parametrize("kind", ["a byte-level BPE", "Llama 3"])
def test_no_copy_of_a_byte_level_vocabulary_is_made_to_know_that(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    normalized = {**KINDS[kind](), "normalizer": {"type": "NFC"}}
    monkeypatch.delattr(tokenizer, "without_token")
    assert unknown_in(loaded(normalized), FOREIGN) == [0]


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": ""}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[a-z]"}, "behavior": "Removed", "invert": False}},
    ],
    ids=["a normalizer", "a pre-tokenizer"],
)
@pytest.mark.parametrize("make", [learned, unigram, wordlevel])
def test_a_text_that_vanishes_is_unknown_text(make: Callable[[], dict[str, Any]], part: dict[str, Any]) -> None:
    assert unknown_in(loaded({**make(), **part}), "stone", "") == [5, 0]


def test_an_unknown_token_that_the_text_spells_is_known() -> None:
    assert unknown_in(loaded(wordlevel()), "stone <unk> stone <unk>", f"<unk> {FOREIGN}") == [0, 7]


def test_bytes_that_are_missing_are_counted_where_the_text_has_them() -> None:
    made = sentencepiece_bpe()
    vocabulary = {name: number for name, number in made["model"]["vocab"].items() if name != "<0xE2>"}
    library = loaded({**made, "model": {**made["model"], "unk_token": None, "vocab": vocabulary}})
    assert unknown_in(library, "stone", "stone \N{SNOWMAN}", "\N{LATIN SMALL LETTER E WITH ACUTE}") == [0, 3, 0]


@pytest.mark.parametrize("make", [unigram, wordlevel, merged_characters])
def test_text_of_which_most_is_unknown_is_refused_with_its_place(
    make: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    texts = [*PARAGRAPHS, *(f"\N{MOUNTAIN}\N{SNOWMAN} {number}" * 9 for number in range(60))]
    rule = r"data.max_rejected_fraction = 0.01: .* know [34],\d+ of .* bytes .*, first in a\.jsonl, offset 55\d\d; rule"
    with pytest.raises(InvalidCorpus, match=rule):
        build_with(make(), tmp_path, MemoryStore(), texts)


def test_much_unknown_text_is_refused_as_soon_as_it_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = list[str](), Tokenizer.encode_flat
    monkeypatch.setattr(Tokenizer, "encode_flat", lambda self, texts: (encoded.extend(texts), encode(self, texts))[1])
    for name, value in (("BATCH_BYTES", 100), ("PART_BYTES", 1000), ("WORKERS", 1)):
        monkeypatch.setattr(snapshot_writer, name, value)
    with pytest.raises(InvalidCorpus, match=r"bytes of text so far, first in a.jsonl, offset 0; rule"):
        build_with(wordlevel(), tmp_path, MemoryStore(), ["\N{MOUNTAIN}" * 40, *PARAGRAPHS])
    assert len(encoded) < 20


def test_a_little_unknown_text_is_counted_and_said_then_and_when_the_snapshot_is_found(tmp_path: Path) -> None:
    store, texts = MemoryStore(), [*PARAGRAPHS, "stone \N{MOUNTAIN}"]
    made = build_with(wordlevel(), tmp_path, store, texts)
    again = build_with(wordlevel(), tmp_path, store, texts)
    assert (made.reused, again.reused, made.unknown_bytes) == (False, True, 3)
    assert made.notes == again.notes and "tokenizer: 3 bytes of the text (0.07%) are unknown" in made.notes[0]


def test_a_found_snapshot_is_held_to_the_share_of_today(tmp_path: Path) -> None:
    store, texts = MemoryStore(), [*PARAGRAPHS, "stone \N{MOUNTAIN}"]
    build_with(wordlevel(), tmp_path, store, texts)
    with pytest.raises(InvalidCorpus, match=r"does not know 3 of"):
        build_with(wordlevel(), tmp_path, store, texts, max_rejected_fraction=0.0001)


def test_what_is_known_wholly_is_not_mentioned(tmp_path: Path) -> None:
    assert snapshot_of(tmp_path, llama2()).notes == ()


def test_parts_of_another_version_are_not_read(tmp_path: Path) -> None:
    encoder = snapshot_writer.PartEncoder(tokenizer=Tokenizer.bytes(), data=DataConfig(sources=("a",)))
    other = encoder.schema.remove(encoder.schema.get_field_index("unknown"))
    with snapshot_writer.pa.OSFile(str(tmp_path / "part-000000.arrow"), "wb") as sink:
        snapshot_writer.pa.ipc.new_file(sink, other).close()
    snapshot_writer.complete_parts(tmp_path, [], encoder)
    assert not list(tmp_path.iterdir())


def dropping(dropout: float) -> dict[str, Any]:
    made = learned()
    return {**made, "model": {**made["model"], "dropout": dropout}}


def snapshot_of(folder: Path, made: dict[str, Any]) -> SnapshotReference:
    return build_with(made, folder, MemoryStore(), PARAGRAPHS)


def test_dropout_in_a_tokenizer_is_off_and_said_in_one_line(tmp_path: Path) -> None:
    plain, dropped = snapshot_of(tmp_path, learned()), snapshot_of(tmp_path, dropping(0.1))
    assert dropped.snapshot_id == plain.snapshot_id
    assert dropped.notes == ("tokenizer: dropout = 0.1 turned off, so that each document has one encoding, all of it",)


def test_a_dropout_of_nothing_keeps_the_tokenizer_as_it_is(tmp_path: Path) -> None:
    made = snapshot_of(tmp_path, dropping(0.0))
    assert made.notes == () and made.manifest.tokenizer_sha256 != snapshot_of(tmp_path, learned()).snapshot_id


def test_truncation_and_padding_are_off_and_said(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    filled = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    made = snapshot_of(tmp_path, {**learned(), "truncation": cut, "padding": filled})
    assert made.snapshot_id == snapshot_of(tmp_path, learned()).snapshot_id
    assert "truncation, padding turned off" in made.notes[0]
