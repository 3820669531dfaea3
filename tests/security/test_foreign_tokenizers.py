"""A tokenizer.json decides which tokens a text has, not how long a process takes, nor how much memory."""

import json
import random
import re
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from cairn.model.data.tokenizer import Tokenizer
from cairn.model.data.tokenizer_file import load_tokenizer
from cairn.model.errors import InvalidInput
from cairn.storage.errors import IntegrityError
from cairn.storage.stores import child_process
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.foreign_tokenizer import parse_tokenizer, read_tokenizer
from cairn.tasks.data.token_import import TokenFiles, import_tokens
from tests.commands import run_here
from tests.file_ceilings import slowness
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
    assert parse_tokenizer(tokenizer.json).sha256 == tokenizer.sha256


def hostile_text(name: str) -> str:
    return "[" * 100_000 if HOSTILE[name] is None else json.dumps(HOSTILE[name])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_one_line_that_says_what_to_do(name: str) -> None:
    text, begun = hostile_text(name), time.process_time()
    with pytest.raises(InvalidInput, match=r"tokenizer\.json") as refusal:
        load_tokenizer(text)
    assert len(str(refusal.value).splitlines()) == 1 and len(str(refusal.value)) < 300
    assert time.process_time() - begun < 5 * slowness()


@pytest.mark.parametrize("name", ["a decoder that doubles thirty times", "a token of a megabyte", "a deep list"])
def test_a_hostile_file_is_refused_in_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(hostile_text(name))
    with pytest.raises(InvalidInput) as refusal:
        read_tokenizer(path)
    assert str(refusal.value).startswith(f"tokenizer file {path}: ") and "\n" not in str(refusal.value)


def test_a_pattern_that_takes_too_long_for_a_text_refuses_it_in_one_line() -> None:
    tokenizer = parse_tokenizer(json.dumps(document(pre_tokenizer=split("q*q*q*(?:1|2)"))))
    with pytest.raises(InvalidInput, match=r"^the tokenizer cannot encode the text: .*retry-limit-in-match over$"):
        tokenizer.encode_flat(["q" * 2000 + " 1"])


def test_a_document_with_two_decoders_is_read_as_it_was_checked() -> None:
    hostile, harmless = json.dumps(HOSTILE["a decoder that doubles thirty times"]), json.dumps(BYTE_LEVEL)
    twice = f'{hostile[:-1]}, "decoder": {harmless}}}'
    assert len(load_tokenizer(twice).decode([2])) == 1


def files_with(pattern: str) -> list[str]:
    packages = ("cairn", "flows", "reports", "tasks", "model", "storage")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return [path.name for path in files if re.search(pattern, path.read_text(encoding="utf-8"))]


def test_no_other_road_leads_to_the_library() -> None:
    assert files_with(r"\.from_(?:str|buffer|file)\(") == ["tokenizer_file.py"]


def test_no_road_leads_past_the_child() -> None:
    assert files_with(r"(?:import .*\b|tokenizer_file\.)load_tokenizer\b") == ["foreign_tokenizer.py"]


def wide_vocabulary(tokens: int) -> str:
    """Return a Unigram that passes every rule: of each token the library makes 32 nodes of a tree, 10 kB in all."""
    chosen = random.Random(0)
    vocabulary = ["</s>", "<s>"]
    vocabulary += ["".join(chr(chosen.randrange(0x10400, 0x1F000)) for _ in range(8)) for _ in range(tokens)]
    model = {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": [[token, -1.0] for token in vocabulary]}
    return json.dumps(document(model=model), ensure_ascii=False)


def test_one_that_takes_more_memory_than_its_bound_ends_a_child_and_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_process, "_LEAST_MEMORY_BYTES", 192 << 20)
    parse_tokenizer(wide_vocabulary(100))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInput, match=r"^tokenizer\.json: it takes more than .* MiB of memory .*; rule: .*bpe:"):
        parse_tokenizer(wide_vocabulary(30_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "memory of this process, in kB"


@pytest.mark.slow  # the same with the limit that stands there, and four gigabytes
def test_one_of_the_greatest_vocabulary_is_refused_by_the_limit_that_is_always_there() -> None:
    with pytest.raises(InvalidInput, match=r"^tokenizer\.json: it takes more than 1,3\d\d MiB of memory"):
        parse_tokenizer(wide_vocabulary(500_000))


@pytest.mark.slow  # quick witness: tests/security/test_chat_templates.py, a template that does not end
def test_a_parser_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the child finds installed packages only
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(IntegrityError, match=r"^it takes more than 1 s of a core\. Take another$"),
        child_process.bounded_process(
            "tests.security.endless_parser", file=file, remedy="Take another", core_seconds=1
        ) as stdout,
    ):
        stdout.read()


def test_a_reading_verb_refuses_the_hostile_tokenizer_of_a_store_in_one_line(tmp_path: Path) -> None:
    hostile = Tokenizer(Library.from_str(json.dumps(HOSTILE["a decoder that doubles thirty times"])))
    for name, tokens in (("train.bin", [7, 7, 7, 0] * 99), ("val.bin", [7, 7, 0] * 99)):
        np.array(tokens, dtype="<u2").tofile(tmp_path / name)
    files: TokenFiles = {"train": (tmp_path / "train.bin",), "val": (tmp_path / "val.bin",)}
    snapshot = import_tokens(LocalStore(tmp_path / "store"), files, hostile)
    ended = run_here(("data", snapshot.snapshot_id, "--window", "0", "--block-size", "8"), tmp_path, {})
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "decoder has Replace 30 times; rule:" in ended.err
