"""Which files a source names: globs, empty and excluded files, held-out files; and the parts within a file."""

import contextlib
import glob
import gzip
import io
import json
import os
import re
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.errors import IntegrityError
from cairn.storage.snapshots.snapshot_manifest import RejectedRow
from cairn.tasks.data import document_reader, source_files, text_format
from cairn.tasks.data.document import Document, InvalidCorpus
from cairn.tasks.data.rejection import RejectionKind
from cairn.tasks.data.text_format import elements_of
from tests.tasks.corpus_files import open_sources, shaped

TEXTS = ["One stone is grey.", "Another lies by the lake."]
LINES = shaped(TEXTS, "jsonl")
PROSE = b"It was a dark night; [and] {so on}.\n"
ARRAY = json.dumps([{"text": text, "tags": [["a"], {}, "\\"]} for text in TEXTS]).encode()


@pytest.mark.parametrize("empty", ["_SUCCESS", "__init__.py", "b.jsonl", "b.txt", "b.jsonl.gz"])
def test_an_empty_file_of_a_glob_is_skipped_and_counted(empty: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / empty).write_bytes(gzip.compress(b"") if empty.endswith("gz") else b"")
    pieces = [piece for source in open_sources(["*"], tmp_path) for piece in source.pieces()]
    assert [piece.text for piece in pieces if isinstance(piece, Document)] == TEXTS
    assert [(p.source, p.kind) for p in pieces if isinstance(p, RejectedRow)] == [(empty, RejectionKind.EMPTY_FILE)]


def test_white_space_alone_in_a_glob_is_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(PROSE)
    (tmp_path / "b.txt").write_bytes(b" \n")
    pieces = [piece for source in open_sources(["*.txt"], tmp_path) for piece in source.pieces()]
    assert [piece.kind for piece in pieces if isinstance(piece, RejectedRow)] == [RejectionKind.EMPTY_FILE]


@pytest.mark.parametrize("folder", ["data [v1]", "a[0-9]", "what?", "star*"])
@pytest.mark.parametrize("source", ["{}/*.jsonl", "{}/**/*.jsonl"])
def test_a_glob_below_a_folder_with_brackets_finds_its_files(folder: str, source: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.jsonl").write_bytes(LINES)
    assert len(open_sources([source.format(folder)], tmp_path)) == 1
    assert len(open_sources(["*.jsonl"], tmp_path / folder)) == 1


def test_a_file_name_that_is_not_utf8_is_refused_in_words(tmp_path: Path) -> None:
    (Path(tmp_path) / b"a\xff.jsonl".decode("utf-8", "surrogateescape")).write_bytes(LINES)
    with pytest.raises(InvalidCorpus, match=r"named b'.*a\\xff.jsonl'; rule: names are UTF-8"):
        open_sources(["*.jsonl"], tmp_path)


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("b.jsonl", ["a.jsonl", "sub/b.txt"]),
        ("*.txt", ["a.jsonl", "b.jsonl"]),
        ("sub/*", ["a.jsonl", "b.jsonl"]),
        ("*/b.t*", ["a.jsonl", "b.jsonl"]),
        ("sub/", ["a.jsonl", "b.jsonl"]),
        ("./sub/../b.jsonl", ["a.jsonl", "sub/b.txt"]),
        ("none", ["a.jsonl", "b.jsonl", "sub/b.txt"]),
    ],
)
def test_excluded_files_are_left_out(pattern: str, left: list[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    (tmp_path / "sub" / "b.txt").write_bytes(PROSE)
    found = open_sources(["**/*.*"], tmp_path, exclude=(pattern,))
    assert [source.name for source in found] == left


def test_a_loop_of_links_gives_no_file_a_longer_name(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "b"):
        (folder / "a").symlink_to(tmp_path)
    (tmp_path / "b" / "c" / "x.jsonl").write_bytes(LINES)
    (tmp_path / "y.jsonl").write_bytes(LINES)
    assert [source.name for source in open_sources(["**/*.jsonl"], tmp_path)] == ["b/c/x.jsonl", "y.jsonl"]
    assert [source.name for source in open_sources(["a/*.jsonl"], tmp_path)] == ["y.jsonl"]


@pytest.mark.parametrize("name", ["pipe", "socket", "link", "loop"])
def test_a_path_that_is_no_file_is_refused_by_its_kind_and_left_out_of_globs(name: str, tmp_path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener, contextlib.chdir(tmp_path):
        (tmp_path / "a.txt").write_bytes(PROSE)
        os.mkfifo("pipe")
        listener.bind("socket")
        os.symlink("gone", "link")
        os.symlink("loop", "loop")
        with pytest.raises(InvalidCorpus, match="a link to nothing, a pipe or a device"):
            open_sources([name], tmp_path)
        assert [source.name for source in open_sources(["*"], tmp_path)] == ["a.txt"]


@pytest.mark.parametrize("held", ["gone.txt", "gone*.txt", ".", "empty.txt", "bad.txt", "x://y"])
def test_a_mistake_in_held_out_files_names_their_key(held: str, tmp_path: Path) -> None:
    for name, content in (("a.txt", PROSE), ("empty.txt", b""), ("bad.txt", LINES)):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidCorpus, match=rf"^data.val_sources = '{re.escape(held)}': "):
        open_sources(["a.txt"], tmp_path, val_sources=(held,))


def test_excluding_all_of_a_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(InvalidCorpus, match=r"data\.exclude leaves out all"):
        open_sources(["*.jsonl"], tmp_path, exclude=("*.jsonl",))


def test_held_out_files_of_their_own_are_all_of_val(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(PROSE * 40)
    (tmp_path / "val.txt").write_bytes(PROSE * 4)
    found = open_sources(["*.txt"], tmp_path, val_sources=("val.txt",))
    splits = {(piece.source, piece.split(0.1)) for source in found for piece in source.documents()}
    assert splits == {("train.txt", "train"), ("val.txt", "val")}


def test_built_in_text_is_all_of_train_beside_held_out_files(tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_bytes(PROSE * 4)
    found = open_sources(["python:topics"], tmp_path, val_sources=("val.txt",))
    splits = {(piece.source, piece.split(0.1)) for source in found for piece in source.documents()}
    assert splits == {("python:topics", "train"), ("val.txt", "val")}


def test_a_separator_divides_a_text_into_documents(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbffirst\nline\n<|end|>\r\n\nsecond\n<|end|>\n \n<|end|>\nthird"
    (tmp_path / "a.txt").write_bytes(content)
    (source,) = open_sources(["a.txt"], tmp_path, separator="<|end|>")
    found = list(source.documents())
    assert [document.text for document in found] == ["first\nline", "second", "third"]
    assert all(content[item.offset_bytes :].startswith(item.text.encode()) for item in found)


def test_a_text_without_its_separator_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_reader, "LONGEST_LINE_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(PROSE * 40)
    (source,) = open_sources(["a.txt"], tmp_path, separator="none", max_document_bytes=64)
    found = [document.text for document in source.documents()]
    assert "".join("".join(found).split()) == "".join((PROSE * 40).decode().split())
    assert max(map(len, found)) <= 64


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(values=st.lists(VALUES, max_size=6), indent=st.sampled_from([None, 1]), chunk=st.integers(1, 9))
def test_the_elements_of_an_array_are_found_whatever_they_hold(
    values: list[object], indent: int | None, chunk: int
) -> None:
    content = json.dumps(values, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_format, "CHUNK_BYTES", chunk)
        found = list(elements_of(io.BytesIO(content), 1 << 20))
    assert [json.loads(element.decode("utf-8", "surrogatepass")) for _, element in found] == values
    assert all(content[offset:].startswith(element) for offset, element in found)


@pytest.mark.parametrize("cut", range(1, len(ARRAY)))
def test_every_cut_of_an_array_is_refused(cut: int) -> None:
    with pytest.raises(IntegrityError):
        list(elements_of(io.BytesIO(ARRAY[:cut]), 1 << 20))


@pytest.mark.parametrize("content", [b"", b"{}", b"x [1]", b"[1] [2]", b'{"a": [1]}'])
def test_anything_but_one_array_is_refused(content: bytes) -> None:
    with pytest.raises(IntegrityError):
        list(elements_of(io.BytesIO(content), 1 << 20))


@pytest.mark.parametrize(
    "pattern", ["**", "**/*", "a/**", "a/**/*.t", "**/c/**/*.t", "*/**/x.t", "**/.h/*", "a**", "**/**/y.t", "l/**/y.t"]
)
def test_a_glob_finds_what_pythons_own_finds(pattern: str, tmp_path: Path) -> None:
    for name in ("x.t", "a/x.t", "a/b/c/x.t", "a/b/c/d/y.t", "a/[c]/x.t", ".h/x.t", "a**/y.t", "axe", ".x.t"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(PROSE)
    (tmp_path / "l").symlink_to("a/b")
    wanted = {path for path in glob.glob(f"{tmp_path}/{pattern}", recursive=True) if os.path.isfile(path)}
    assert set(filter(os.path.isfile, source_files._expand(f"{tmp_path}/{pattern}"))) == wanted and wanted
