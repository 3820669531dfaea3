"""A tokenizer.json decides which tokens a text has, not how long a process takes, nor how much memory."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from model.data.tokenizer import Tokenizer
from model.data.tokenizer_file import load_tokenizer
from model.errors import InvalidInput
from storage.stores.local_store import LocalStore
from tasks.data.token_import import TokenFiles, import_tokens
from tests.commands import run_here
from tests.security.tokenizer_shapes import BYTE_LEVEL, HOSTILE, KNOWN, PATTERNS, document, sequence, split

ROOT = Path(__file__).parents[2]
TEXT = "a ab  abc\n\n3000000 ``b'' é 漢字 <s>"


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_tokenizer_is_the_same_as_without_the_check(name: str) -> None:
    text = json.dumps(KNOWN[name])
    library, ours = Library.from_str(text), load_tokenizer(text)
    assert ours.to_str() == library.to_str()
    assert ours.encode(TEXT).ids == library.encode(TEXT).ids
    assert ours.decode([2, 3, 0], skip_special_tokens=False) == library.decode([2, 3, 0], skip_special_tokens=False)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_known_pattern_is_accepted(name: str) -> None:
    parts = sequence("pretokenizers", split(PATTERNS[name]), BYTE_LEVEL)
    load_tokenizer(json.dumps(document(pre_tokenizer=parts, decoder=BYTE_LEVEL)))


@pytest.mark.parametrize("tokenizer", [Tokenizer.bytes(), Tokenizer.train_bpe(["to be or not to be"] * 9, 262)])
def test_a_tokenizer_that_was_made_here_keeps_its_identity(tokenizer: Tokenizer) -> None:
    assert Tokenizer.from_json(tokenizer.to_json()).sha256 == tokenizer.sha256


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_one_line_that_says_what_to_do(name: str, tmp_path: Path) -> None:
    found = HOSTILE[name]
    (tmp_path / "tokenizer.json").write_text("[" * 100_000 if found is None else json.dumps(found))
    begun = time.process_time()
    with pytest.raises(InvalidInput, match=r"tokenizer\.json") as refusal:
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert len(str(refusal.value).splitlines()) == 1 and len(str(refusal.value)) < 700
    assert time.process_time() - begun < 5


def test_a_document_with_two_decoders_is_read_as_it_was_checked() -> None:
    hostile, harmless = json.dumps(HOSTILE["a decoder that doubles thirty times"]), json.dumps(BYTE_LEVEL)
    twice = f'{hostile[:-1]}, "decoder": {harmless}}}'
    assert len(load_tokenizer(twice).decode([2])) == 1


def test_no_other_road_leads_to_the_library() -> None:
    reading = re.compile(r"\.from_(?:str|buffer)\(|TokenizerFile\.from_file\(")
    packages = ("cairn", "flows", "reports", "tasks", "model", "storage")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    assert [path.name for path in files if reading.search(path.read_text(encoding="utf-8"))] == ["tokenizer_file.py"]


def test_a_reading_verb_refuses_the_hostile_tokenizer_of_a_store_in_one_line(tmp_path: Path) -> None:
    hostile = Tokenizer(Library.from_str(json.dumps(HOSTILE["a decoder that doubles thirty times"])))
    for name, tokens in (("train.bin", [7, 7, 7, 0] * 99), ("val.bin", [7, 7, 0] * 99)):
        np.array(tokens, dtype="<u2").tofile(tmp_path / name)
    files = TokenFiles(train=(tmp_path / "train.bin",), val=(tmp_path / "val.bin",))
    snapshot = import_tokens(LocalStore(tmp_path / "store"), files, hostile)
    ended = run_here(("data", snapshot.snapshot_id, "--window", "0", "--block-size", "8"), tmp_path, {})
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "decoder has Replace 30 times; rule:" in ended.err
