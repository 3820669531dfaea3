"""What each name and content becomes: a known suffix decides, else the first bytes; a contradiction is refused."""

import io
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.tasks.data.document import InvalidCorpus, require_few_rejected, survey_corpus
from cairn.tasks.data.text_format import pieces_of
from tests.tasks.corpus_files import open_sources, packed, shaped

pytestmark = pytest.mark.usefixtures("forked_parsers")

TEXTS = ['One stone is grey, "quoted".', "Another\nlies, by the\tlake — höher.", "A third, [bracketed] {one}."]
LINES = shaped(TEXTS, "jsonl")
ARRAY = json.dumps([{"id": n, "text": text, "tags": [["a"], {}]} for n, text in enumerate(TEXTS)], indent=1).encode()
PARQUET = shaped(TEXTS, "parquet")
CSV = b"id,text\r\n" + b"".join(b'%d,"%s"\r\n' % (n, text.replace('"', '""').encode()) for n, text in enumerate(TEXTS))
TSV = CSV.replace(b"id,text", b"id\ttext").replace(b',"', b'\t"')
MARK = b"\xef\xbb\xbf"
HTML = b"<!DOCTYPE html>\n<html><body><a href=a.txt>a.txt</a></body></html>"
INFO = json.dumps({"description": "a data set", "features": {"text": "string"}}, indent=2).encode()
PROSE = b"It was a dark night; [and] {so on}.\n"


def texts_of(folder: Path, name: str, content: bytes, **settings: Any) -> list[str]:
    (folder / name).write_bytes(content)
    return [document.text for source in open_sources([name], folder, **settings) for document in source.documents()]


def refusal(folder: Path, name: str, content: bytes, **settings: Any) -> str:
    with pytest.raises(InvalidCorpus) as refused:
        texts_of(folder, name, content, **settings)
    return str(refused.value)


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.ndjson", LINES),
        ("a.jsonlines", LINES),
        ("a.jl", LINES),
        ("a.json", LINES),
        ("a.json", ARRAY),
        ("a.JSON", LINES),
        ("part-00000", LINES),
        ("part-00000", ARRAY),
        ("part-00000", PARQUET),
        ("c4-train.00000-of-01024", LINES),
        ("a.unheard", LINES),
        ("a.parquet", PARQUET),
        ("a.pq", PARQUET),
        ("a.csv", CSV),
        ("a.tsv", TSV),
        ("a.jsonl", MARK + LINES),
        ("a.json", MARK + ARRAY),
        ("a.csv", MARK + CSV),
        ("a", MARK + LINES),
    ],
)
def test_a_name_and_a_content_become_the_same_documents(
    name: str, content: bytes, compression: str, tmp_path: Path
) -> None:
    assert texts_of(tmp_path, name + compression, packed(content, compression)) == TEXTS


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("content", [LINES, ARRAY, PARQUET])
def test_a_compressed_file_without_a_suffix_is_recognised(content: bytes, compression: str, tmp_path: Path) -> None:
    assert texts_of(tmp_path, "part-00000", packed(content, compression)) == TEXTS


def test_gzip_has_two_suffixes(tmp_path: Path) -> None:
    assert texts_of(tmp_path, "a.jsonl.gzip", packed(LINES, ".gz")) == TEXTS


@pytest.mark.parametrize(
    "text", ['["Well," she said, "so be it."]', "[[File:a.png]] [1, 2]", "[1] Knuth", "a\0b", "[]("]
)
def test_prose_with_signs_of_other_formats_stays_prose(text: str, tmp_path: Path) -> None:
    assert texts_of(tmp_path, "a", text.encode() + b"\n", split="documents") == [f"{text}\n"]


@pytest.mark.parametrize("name", ["a.txt", "a", "README", "notes.org", "a.md", "a.py", "a.html"])
def test_prose_is_one_document_under_any_name(name: str, tmp_path: Path) -> None:
    assert texts_of(tmp_path, name, PROSE * 3, split="documents") == [PROSE.decode() * 3]


@pytest.mark.parametrize("content", [MARK + PROSE, packed(MARK + PROSE, ".gz")])
@pytest.mark.parametrize("split", ["documents", "end"])
def test_a_byte_order_mark_is_no_text(content: bytes, split: str, tmp_path: Path) -> None:
    name = "a.txt" if content.startswith(MARK) else "a.txt.gz"
    assert "".join(texts_of(tmp_path, name, content, split=split)) == PROSE.decode()


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("a.txt", LINES, ("text", "lines of JSON", 'data.format = "jsonl"')),
        ("a.txt", ARRAY, ("text", "a JSON array of objects", 'data.format = "json"')),
        ("a.md", PARQUET, ("text", "Parquet", 'data.format = "parquet"')),
        ("a.txt", packed(LINES, ".gz"), ("text", "gzip", "data.format")),
        ("a.jsonl", ARRAY, ("lines of JSON", "a JSON array of objects", 'data.format = "json"')),
        ("a.jsonl", PARQUET, ("lines of JSON", "Parquet", 'data.format = "parquet"')),
        ("a.jsonl", HTML, ("lines of JSON", "an HTML page")),
        ("a.json", PROSE, ("JSON", "text", 'data.format = "text"')),
        ("dataset_info.json", INFO, ("JSON", "one JSON object over several lines", "data.exclude")),
        ("a.csv", LINES, ("CSV", "lines of JSON", 'data.format = "jsonl"')),
        ("a.parquet", LINES, ("Parquet", "lines of JSON", 'data.format = "jsonl"')),
        ("a.parquet", b"no table at all", ("its name says Parquet, its first bytes text", "data.exclude")),
        ("a.txt", b"PK\x03\x04 and more", ("text", "a zip file")),
        ("a.txt", "naïve".encode("utf-16"), ("text", "UTF-16 text", "Convert it")),
        ("a.jsonl.gz", LINES, (".gz", "not gzip's")),
        ("a.jsonl.zst", packed(LINES, ".gz"), (".zst", "not zstd's")),
        ("a.jsonl.gz", packed(packed(LINES, ".gz"), ".gz"), ("lines of JSON", "gzip once more")),
        ("page", HTML, ("an HTML page", 'data.format = "text"')),
        ("info", INFO, ("one JSON object over several lines", "data.exclude")),
        ("model", b"\x93NUMPY\x01\x00", ("a NumPy array",)),
        ("part-0.bz2", b"BZh9", (".bz2", "not read")),
        ("a.txt", PROSE.decode().encode("utf-16-le"), ("text", "full of NUL bytes, as UTF-16", "Convert it")),
        ("a", PROSE.decode().encode("utf-16-be"), ("full of NUL bytes",)),
        ("a.jsonl", LINES.decode().encode("utf-16-le"), ("lines of JSON", "full of NUL bytes")),
        ("ids", bytes(range(100)) + b"\1\0\2\0" * 99, ("full of NUL bytes", "numbers")),
        ("a", json.dumps(TEXTS).encode(), ("a JSON array of other values", 'data.format = "text"')),
        ("a.json", json.dumps([TEXTS]).encode(), ("JSON", "a JSON array of other values")),
        ("a", b"[" + ARRAY + b"]", ("a JSON array of other values",)),
        ("a", b"\x1e" + LINES.replace(b"\n", b"\n\x1e"), ("a JSON text sequence",)),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ("text", "Git LFS", "git lfs pull")),
        ("a.warc.gz", packed(b"WARC/1.0\r\n", ".gz"), ("a WARC archive",)),
    ],
)
def test_what_contradicts_itself_is_refused_with_both_facts(
    name: str, content: bytes, facts: tuple[str, ...], tmp_path: Path
) -> None:
    words = refusal(tmp_path, name, content)
    assert all(fact in words for fact in facts), words
    assert name in words and len(words.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [("a.txt", LINES, "jsonl"), ("a.jsonl", ARRAY, "json"), ("a.dat", CSV, "csv"), ("a.txt", TSV, "tsv")],
)
def test_data_format_settles_what_a_name_leaves_open(name: str, content: bytes, form: str, tmp_path: Path) -> None:
    assert texts_of(tmp_path, name, content, format=form) == TEXTS


def test_data_format_text_trains_on_the_lines_themselves(tmp_path: Path) -> None:
    assert "".join(texts_of(tmp_path, "a.txt", LINES, format="text")) == LINES.decode()


def test_a_query_is_no_part_of_a_name(tmp_path: Path) -> None:
    place = f"{tmp_path.name}/a.jsonl?download=true"
    fsspec.filesystem("memory").pipe_file(f"/{place}", LINES)
    (source,) = open_sources([f"memory://{place}"], tmp_path)
    assert [document.text for document in source.documents()] == TEXTS


def test_byte_order_marks_of_files_that_were_joined_cost_no_document(tmp_path: Path) -> None:
    assert texts_of(tmp_path, "a.jsonl", MARK + MARK + LINES + MARK + LINES) == TEXTS * 2


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "kept", "score": NaN}',
        b'{"score": -Infinity, "text": "kept"}',
        b'{"title": "\\ud83d", "text": "kept"}',
        b'{"title": "\xff", "text": "kept"}',
    ],
)
def test_a_document_is_kept_for_a_field_that_nobody_reads(line: bytes, tmp_path: Path) -> None:
    assert texts_of(tmp_path, "a.jsonl", LINES + line) == [*TEXTS, "kept"]


@pytest.mark.parametrize("line", [b'{"text": "\\ud83d"}', b'{"text": "\xff", "score": NaN}', b"nonsense"])
def test_a_bad_text_is_still_left_out(line: bytes, tmp_path: Path) -> None:
    assert texts_of(tmp_path, "a.jsonl", LINES + line) == TEXTS


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", CSV + b'4,"open\n5,five\n'), ("a.tsv", TSV + b'4\t"open\nfive')]
)
def test_a_quote_that_is_never_closed_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    assert "a quote is open to its end" in refusal(tmp_path, name, content)


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("a.csv", CSV, "'id', 'text'"),
        ("a.tsv", TSV, "'id', 'text'"),
        ("a.csv.gz", packed(MARK + CSV, ".gz"), "'id', 'text'"),
        ("a.parquet", PARQUET, "'number', 'text', 'other'"),
    ],
)
def test_a_table_without_the_column_names_those_it_has(name: str, content: bytes, columns: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (source,) = open_sources([name], tmp_path, text_field="body")
    assert source.places_of([1]) == {1: f"row 2, columns {columns}"}


def test_zstd_with_a_long_window_names_the_remedy(tmp_path: Path) -> None:
    frame = b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x01\x00\x00"  # a window of 2 GiB, as of `zstd --long=31`
    assert "Compress it again without --long" in refusal(tmp_path, "a.jsonl.zst", frame)


def test_too_many_bad_documents_are_refused_with_line_reason_and_fields(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + b'{"body": "x", "url": "y"}\n' * 3)
    sources = open_sources(["a.jsonl"], tmp_path)
    survey = survey_corpus(sources, 0.1, None, deduplicate=False, on_text=lambda done, documents: None)
    with pytest.raises(InvalidCorpus) as refused:
        require_few_rejected(survey.rejected, 0, 0.01, survey.worst)
    assert "line 2, fields 'body', 'url'" in str(refused.value) and "no field 'text'" in str(refused.value)


DRAWN = st.lists(st.sampled_from(["", "one", "zwei höher", "三 四", "x" * 30]), max_size=30).map("\n".join)


@given(text=DRAWN, longest=st.integers(8, 60), share=st.floats(0, 1))
def test_the_pieces_together_are_the_text_and_each_is_whole_characters(text: str, longest: int, share: float) -> None:
    content = text.encode()
    border = int(len(content) * share)
    found = list(pieces_of(io.BytesIO(content), longest, border))
    assert b"".join(piece for _, piece in found) == content
    assert [offset for offset, _ in found] == [sum(len(piece) for _, piece in found[:n]) for n in range(len(found))]
    assert all(piece.decode() and len(piece) <= longest + 3 for _, piece in found)


@given(text=DRAWN, longest=st.integers(8, 60), share=st.floats(0, 1))
def test_no_piece_lies_on_both_sides_of_the_border(text: str, longest: int, share: float) -> None:
    content = text.encode()
    border = int(len(content) * share)
    starts = [offset for offset, _ in pieces_of(io.BytesIO(content), longest, border)]
    first_character = next((at for at in range(border, len(content)) if content[at] & 0xC0 != 0x80), len(content))
    assert first_character in [*starts, len(content)]


def test_a_long_text_is_cut_at_a_paragraph_else_at_a_line_else_anywhere() -> None:
    cut = [piece for _, piece in pieces_of(io.BytesIO(b"aaaa\nbbbb\n\ncccc\ndddd\neeee" + b"f" * 12), 14)]
    assert cut == [b"aaaa\nbbbb\n\n", b"cccc\ndddd\n", b"eeeefff" + b"f" * 7, b"ff"]


def test_bytes_that_are_no_text_are_cut_all_the_same() -> None:
    content = b"\x80" * 50
    assert b"".join(piece for _, piece in pieces_of(io.BytesIO(content), 8, 20)) == content
