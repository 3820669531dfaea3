import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data import corpus
from tasks.data.corpus import open_corpus, preview_corpus
from tasks.data.document import InvalidCorpus
from tasks.data.document_reader import blocks_of
from tasks.data.text_format import CHUNK_BYTES


def texts_of(sources: list[str], base_dir: Path) -> list[str]:
    return [document.text for source in open_corpus(sources, base_dir) for document in source.documents()]


def refusal(sources: list[str], base_dir: Path) -> str:
    with pytest.raises(InvalidCorpus) as caught:
        open_corpus(sources, base_dir)
    return str(caught.value)


def test_a_file_named_by_its_path_gives_its_blocks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n\none\ntwo\n \t\n\nthree\r\n\r\nfour")
    assert texts_of(["a.txt"], tmp_path) == ["one\ntwo", "three", "four"]


def test_every_file_of_a_glob_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\n")
    (tmp_path / "b.txt").write_bytes(b"three")
    assert texts_of(["*.txt"], tmp_path) == ["one\n\ntwo\n", "three"]


def test_a_glob_reaches_into_folders(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "a.txt").write_bytes(b"deep")
    (tmp_path / "b.txt").write_bytes(b"shallow")
    assert texts_of(["**/*.txt"], tmp_path) == ["shallow", "deep"]


@given(texts=st.lists(st.binary(max_size=30), max_size=8))
def test_block_offsets_point_at_the_block_in_its_source(texts: list[bytes]) -> None:
    content = b"\n\n".join(texts)
    lines = content.splitlines(keepends=True)
    assert all(content[offset : offset + len(block)] == block for offset, block in blocks_of(iter(lines)))


def test_adding_a_source_never_recuts_another(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three\n\nfour")
    assert set(texts_of(["a.txt"], tmp_path)) < set(texts_of(["b.txt", "a.txt"], tmp_path))


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
    names = [[item.name for item in open_corpus(["**/*.txt"], tmp_path / place)] for place in ("here", "far/away")]
    assert names == [["a.txt", "in/b.txt"]] * 2


def test_a_file_url_and_a_memory_url_are_read(tmp_path: Path) -> None:
    import fsspec

    (tmp_path / "a.txt").write_text("one")
    fsspec.filesystem("memory").pipe_file("/corpus/b.txt", b"two\n\nthree")
    sources = [f"file://{tmp_path}/*.txt", "memory://corpus/b.txt"]
    assert texts_of(sources, tmp_path) == ["one", "two", "three"]


def test_an_url_that_names_nothing_is_refused(tmp_path: Path) -> None:
    assert "no such object" in refusal(["memory://corpus/absent.txt"], tmp_path)
    assert "the glob matches no file" in refusal(["memory://corpus/absent*.txt"], tmp_path)
    assert "cannot be opened" in refusal(["nowhere://corpus/a.txt"], tmp_path)


def test_a_missing_source_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(["absent.txt"], tmp_path)
    assert "data.sources = 'absent.txt'" in message
    assert f"looked at {tmp_path}/absent.txt" in message
    assert "rule: every source exists" in message


def test_a_glob_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    assert "the glob matches no file" in refusal(["*.text"], tmp_path)


def test_a_directory_is_refused_with_the_glob_to_write_instead(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    assert "is a directory; rule: files or globs" in refusal(["texts"], tmp_path)
    assert "texts/**/*.txt" in refusal(["texts/"], tmp_path)


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_a_source_without_text_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    message = refusal(["a.txt"], tmp_path)
    assert f"file {tmp_path}/a.txt: the file " in message
    assert "rule: every source has text" in message


def test_no_source_at_all_is_refused(tmp_path: Path) -> None:
    assert "rule: at least one source" in refusal([], tmp_path)


@pytest.mark.parametrize("suffix", ["zip", "tar.gz", "arrow", "XZ"])
def test_formats_that_are_not_read_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.{suffix}").write_text("{}")
    assert " files are not read; rule: plain text, .jsonl or .parquet" in refusal([f"a.{suffix}"], tmp_path)


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
    assert texts_of(["a.txt"], tmp_path) == [text]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user may read everything")
def test_an_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.txt").chmod(0)
    assert "cannot be read" in refusal(["a.txt"], tmp_path)


def test_a_file_that_two_sources_would_cut_differently_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert "also named by data.sources = 'a.txt'" in refusal(["a.txt", "*.txt"], tmp_path)


@pytest.mark.parametrize("later", [b"one\n\nTWO", b"one\n\ntwo\n\nthree", b"\xff", b""])
@pytest.mark.parametrize("source", ["a.txt", "a*.txt"])
def test_a_file_that_changes_after_its_check_is_refused(tmp_path: Path, source: str, later: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo")
    (opened,) = open_corpus([source], tmp_path)
    (tmp_path / "a.txt").write_bytes(later)
    with pytest.raises(InvalidCorpus, match="changed while it was read"):
        list(opened.documents())


def test_the_builtin_corpora_are_sources_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert [source.name for source in open_corpus(["python:topics", "a.txt"], tmp_path)] == ["a.txt", "python:topics"]


def test_a_preview_of_much_text_reads_only_as_far_as_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PREVIEW_BYTES", 10)
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\n\n" + b"\xff" * 20)
    (source,) = preview_corpus(["a.txt"], tmp_path)
    documents = source.documents()
    assert [next(documents).text, next(documents).text] == ["one", "two"]
    assert source.sha256 == ""


def test_a_preview_of_little_text_checks_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\n\n" + b"\xff" * 20)
    with pytest.raises(InvalidCorpus, match="undecodable byte"):
        preview_corpus(["a.txt"], tmp_path)
