import os
import re
from pathlib import Path
from typing import Any

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.tasks.data import corpus
from cairn.tasks.data.corpus import preview_corpus
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.text_format import CHUNK_BYTES
from tests.tasks.corpus_files import open_sources, shaped

pytestmark = pytest.mark.usefixtures("forked_parsers")


def texts_of(sources: list[str], base_dir: Path) -> list[str]:
    opened = open_sources(sources, base_dir, split="documents")
    return [document.text for source in opened for document in source.documents()]


def refusal(sources: list[str], base_dir: Path) -> str:
    with pytest.raises(InvalidCorpus) as caught:
        open_sources(sources, base_dir)
    return str(caught.value)


def splits_of(sources: list[str], base_dir: Path, **rules: Any) -> list[tuple[str | None, str]]:
    opened = open_sources(sources, base_dir, **rules)
    return [(document.placed, document.text) for source in opened for document in source.documents()]


@pytest.mark.parametrize("source", ["a.txt", "*.txt"])
def test_of_a_text_the_end_is_held_out_whatever_way_it_is_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\nthree four")
    assert splits_of([source], tmp_path, val_fraction=0.2) == [("train", "one\n\ntwo\nthree "), ("val", "four")]


def test_the_end_of_each_of_a_few_texts_is_held_out(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name * 8}00")
    expected = [("train", "a" * 8), ("val", "00"), ("train", "b" * 8), ("val", "00")]
    assert splits_of(["*.txt"], tmp_path, val_fraction=0.2) == expected


def test_a_line_of_json_and_a_file_among_many_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "three"}')
    assert splits_of(["b.jsonl"], tmp_path, split="end") == [(None, "three")]
    for number in range(corpus.FEW_FILES + 1):
        (tmp_path / f"{number:03d}.txt").write_text("four")
    assert splits_of(["*.txt"], tmp_path) == [(None, "four")] * (corpus.FEW_FILES + 1)
    assert len(splits_of(["*.txt"], tmp_path, split="end")) == 2 * (corpus.FEW_FILES + 1)


@pytest.mark.parametrize("shape", ["txt", "jsonl", "parquet"])
def test_a_document_above_the_bound_is_cut_at_its_lines(tmp_path: Path, shape: str) -> None:
    lines = [f"line {number:03d} of a long text\n" for number in range(40)]
    text = "".join(lines)
    (tmp_path / f"a.{shape}").write_bytes(text.encode() if shape == "txt" else shaped([text], shape))
    found = splits_of([f"a.{shape}"], tmp_path, split="documents", max_document_bytes=100)
    assert [text for _, text in found] == ["".join(lines[at : at + 4]) for at in range(0, 40, 4)]


def test_only_the_last_piece_before_the_border_and_of_the_text_ends_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    (source,) = open_sources(["a.txt"], tmp_path, max_document_bytes=300, val_fraction=0.4)
    found = [(document.bytes, document.placed, document.ends) for document in source.documents()]
    assert found == [(300, "train", False), (300, "train", True), (300, "val", False), (100, "val", True)]


def test_the_order_of_sources_is_irrelevant(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    assert texts_of(["a.txt", "b.txt"], tmp_path) == texts_of(["b.txt", "a.txt"], tmp_path) == ["one", "two"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert texts_of(["a.txt", "./a.txt", str(tmp_path / "a.txt")], tmp_path) == ["one"]


def test_names_do_not_depend_on_where_the_text_lies(tmp_path: Path) -> None:
    for place in ("here", "far/away"):
        (tmp_path / place / "in").mkdir(parents=True)
        (tmp_path / place / "a.txt").write_text("one")
        (tmp_path / place / "in" / "b.txt").write_text("two")
    names = [[item.name for item in open_sources(["**/*.txt"], tmp_path / place)] for place in ("here", "far/away")]
    assert names == [["a.txt", "in/b.txt"]] * 2


def test_a_file_url_and_a_memory_url_are_read(tmp_path: Path) -> None:
    import fsspec

    (tmp_path / "a.txt").write_text("one")
    fsspec.filesystem("memory").pipe_file("/corpus/b.txt", b"two\n\nthree")
    sources = [f"file://{tmp_path}/*.txt", "memory://corpus/b.txt"]
    assert texts_of(sources, tmp_path) == ["one", "two\n\nthree"]


def test_an_url_with_credentials_is_refused_without_repeating_them(tmp_path: Path) -> None:
    message = refusal(["https://ann:secret@example.org/a.txt"], tmp_path)
    assert "data.sources: a URL carries credentials" in message and "secret" not in message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("absent.txt", "data.sources = 'absent.txt'.*looked at .*/absent.txt.*rule: every source exists and is a file"),
        ("*.text", "the glob matches no file"),
        ("texts", "is a directory; rule: files or globs"),
        ("texts/", r"texts/\*\*/\*\.txt"),
        ("memory://corpus/absent.txt", "no such object"),
        ("memory://corpus/absent*.txt", "the glob matches no file"),
        ("nowhere://corpus/a.txt", "nowhere:// is not read"),
    ],
)
def test_a_source_that_is_no_file_is_refused_with_what_to_write_instead(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "texts").mkdir()
    assert re.search(said, refusal([source], tmp_path))


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_a_source_without_text_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    message = refusal(["a.txt"], tmp_path)
    assert f"file {tmp_path}/a.txt: the file " in message
    assert "rule: every source has text" in message


@pytest.mark.parametrize("suffix", ["zip", "tar.gz", "arrow", "XZ"])
def test_formats_that_are_not_read_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.{suffix}").write_text("{}")
    assert " files are not read; rule: text, JSON, Parquet" in refusal([f"a.{suffix}"], tmp_path)


@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"good \xff bad", 5),
        (b"cut short \xe2\x82", 10),
        (b"x" * (CHUNK_BYTES - 1) + b"\xe2\x82\x28", CHUNK_BYTES - 1),
        ("€".encode() * CHUNK_BYTES + b"\x80", 3 * CHUNK_BYTES),
    ],
)
def test_undecodable_bytes_are_named_by_file_and_offset(tmp_path: Path, content: bytes, offset: int) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    message = refusal(["a.txt"], tmp_path)
    assert f"file {tmp_path}/a.txt" in message
    assert f"undecodable byte 0x{content[offset]:02x} at offset {offset} " in message


def test_a_character_across_two_chunks_is_good_text(tmp_path: Path) -> None:
    text = "x" * (CHUNK_BYTES - 1) + "€"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert "".join(texts_of(["a.txt"], tmp_path)) == text


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user may read everything")
def test_an_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.txt").chmod(0)
    assert "cannot be read" in refusal(["a.txt"], tmp_path)


@pytest.mark.parametrize("later", [b"one\n\nTWO", b"one\n\ntwo\n\nthree", b"\xff", b""])
@pytest.mark.parametrize("source", ["a.txt", "a*.txt"])
def test_a_file_that_changes_after_its_check_is_refused(tmp_path: Path, source: str, later: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo")
    (opened,) = open_sources([source], tmp_path)
    (tmp_path / "a.txt").write_bytes(later)
    with pytest.raises(InvalidCorpus, match="changed while it was read"):
        list(opened.documents())


def test_the_builtin_corpora_are_sources_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert [source.name for source in open_sources(["python:topics", "a.txt"], tmp_path)] == ["a.txt", "python:topics"]


def test_a_preview_of_much_text_reads_only_as_far_as_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PREVIEW_BYTES", 10)
    (tmp_path / "a.jsonl").write_bytes(shaped(["one", "two"], "jsonl") + b"\xff" * 20)
    (source,) = preview_corpus(DataConfig(sources=("a.jsonl",)), tmp_path)
    documents = source.documents()
    assert [next(documents).text, next(documents).text] == ["one", "two"]
    assert source.sha256 == ""


def test_a_preview_of_much_text_knows_where_its_held_out_end_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PREVIEW_BYTES", 10)
    (tmp_path / "a.txt").write_bytes(b"x" * 80 + b"\xff" * 20)
    (source,) = preview_corpus(DataConfig(sources=("a.txt",)), tmp_path)
    assert list(source.sizes(0.1)) == [("train", 90), ("val", 10)]


def test_a_preview_of_little_text_checks_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\n\n" + b"\xff" * 20)
    with pytest.raises(InvalidCorpus, match="undecodable byte"):
        preview_corpus(DataConfig(sources=("a.txt",)), tmp_path)
