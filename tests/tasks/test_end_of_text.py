"""Which token ends a document: known, or named by `data.end_of_text`, for a build and for every later reader."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.foreign_tokenizer import parse_tokenizer
from cairn.tasks.data.token_import import given_tokenizer, import_tokens, numbered_vocabulary
from tests.memory_store import MemoryStore
from tests.tasks.committed_model import commit_model, small_configuration
from tests.tasks.corpus_files import build_with
from tests.tasks.tokenizer_kinds import FLAGS, PARAGRAPHS, learned, wordlevel

pytestmark = pytest.mark.usefixtures("forked_parsers")

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
