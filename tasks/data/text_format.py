"""Recognises what a file of text is, and cuts its text into lines, elements of a JSON array, or pieces.

It goes by the suffix of the name, by the first bytes, or by `data.format`.

A known suffix decides, a missing or unknown one leaves it to the bytes. Where both speak and disagree, the file is
refused with both facts: what is not recognised is never guessed.
Sources: RFC 1952 (gzip), RFC 8878 (Zstandard), jsonlines.org, Apache Parquet, RFC 4180 (CSV); file(1) for the others.
"""

import codecs
import io
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import urlsplit

import msgspec

from cairn.storage.errors import IntegrityError
from cairn.tasks.data.document import InvalidCorpus

HEAD_BYTES = 1 << 16
"""The beginning of a file by which it is recognised."""


class TextFormat(StrEnum):
    """How a file holds its documents."""

    TEXT = "text"
    JSON_LINES = "jsonl"
    JSON = "json"
    PARQUET = "parquet"
    CSV = "csv"
    TSV = "tsv"


_NAMES_AND_SUFFIXES = {
    TextFormat.TEXT: ("text", ".txt .text .md .markdown .rst .tex .htm .html"),
    TextFormat.JSON_LINES: ("lines of JSON", ".jsonl .ndjson .jl .jsonlines"),
    TextFormat.JSON: ("a JSON array of objects", ".json"),
    TextFormat.PARQUET: ("Parquet", ".parquet .pq"),
    TextFormat.CSV: ("CSV", ".csv"),
    TextFormat.TSV: ("TSV", ".tsv"),
}
_NAMES = {form: name for form, (name, _) in _NAMES_AND_SUFFIXES.items()}
_SUFFIXES = {suffix: form for form, (_, suffixes) in _NAMES_AND_SUFFIXES.items() for suffix in suffixes.split()}
_CODECS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_FOREIGN_SUFFIXES = frozenset({".bz2", ".xz", ".zip", ".tar", ".tgz", ".tzst", ".arrow", ".feather", ".orc", ".avro"})
_KINDS = Path(__file__).with_name("file_kinds.toml")
_KEY = rb'\{\s*"(?:\\.|[^"\\])*"\s*:'
_ARRAY = re.compile(rb"\[\s*(?:" + _KEY + rb"|\{\s*\}|\]\s*$)")
_OTHER_ARRAY = re.compile(rb"(?:\[\s*)+(?:\"(?:\\.|[^\"\\\n])*\"\s*[,\]]|" + _KEY + rb")")
_BEGUN_OBJECT = re.compile(_KEY)
_SPREAD_OBJECT = re.compile(rb"\{\s*(?:\n\s*\"|\"(?:\\.|[^\"\\\n])*\"\s*:\s*[\[{]\s*\n)")
_HTML = re.compile(rb"(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html[\s>])", re.I | re.S)
_HTML_NAME, _SPREAD_NAME = "an HTML page", "one JSON object over several lines"
_OTHER_ARRAY_NAME = "a JSON array of other values than objects"
_PERHAPS_TEXT = (_HTML_NAME, _SPREAD_NAME, _OTHER_ARRAY_NAME)
_FEW_NULS = 4
CHUNK_BYTES = 1 << 20
_PARAGRAPHS_AND_LINES = (b"\n\n", b"\n\r\n", b"\n")
_LONGEST_CHARACTER_BYTES = 4
_STRUCTURE = re.compile(rb'\\.|["\[\]{},]', re.S)
Refuse = Callable[[str, str], InvalidCorpus]


def suffixes_of(place: str) -> tuple[str, str]:
    """Return the suffix of the format and that of the compression, lower case, "" without; of a URL by its path."""
    path = urlsplit(place).path if "://" in place else place
    *_, before, last = ["", "", *(suffix.lower() for suffix in PurePosixPath(path).suffixes)]
    return (before, last) if last in _CODECS else (last, "")


def format_of_name(place: str) -> TextFormat | None:
    """Return the format that the suffix of a name says, None if it says none."""
    return _SUFFIXES.get(suffixes_of(place)[0])


def recognise_codec(place: str, head: bytes, wanted: str, refuse: Refuse) -> str:
    """Return `gzip`, `zstd` or "" for a file that begins with `head`; `wanted` is `data.format`."""
    suffix, packed = suffixes_of(place)
    if suffix in _FOREIGN_SUFFIXES and wanted == "auto":
        raise refuse(f"{suffix} files are not read", "text, JSON, Parquet, CSV and TSV are, also as .gz or .zst")
    found = _codec_of(head)
    if packed and found != _CODECS[packed]:
        raise refuse(f"its name ends in {packed}, its first bytes are not {_CODECS[packed]}'s", "name and bytes agree")
    if found and not packed and wanted == "auto" and suffix in _SUFFIXES:
        problem = f"its name says {_NAMES[_SUFFIXES[suffix]]}, its first bytes {found}"
        raise refuse(problem, "name and bytes agree. Rename it, or say with data.format what it unpacks to")
    return found


def recognise_format(place: str, head: bytes, wanted: str, refuse: Refuse) -> TextFormat:
    """Return the format of a file whose decompressed text begins with `head`; `wanted` is `data.format`."""
    if wanted != "auto":
        return TextFormat(wanted)
    suffix, _ = suffixes_of(place)
    said, found = _SUFFIXES.get(suffix), _look(head)
    if said is None:
        if isinstance(found, TextFormat):
            return found
        raise refuse(f"its first bytes are {found}", _settle("text" if found in _PERHAPS_TEXT else ""))
    # Single bad lines are counted where they are read.
    agreeing: tuple[TextFormat | str, ...] = (said, TextFormat.TEXT, _OTHER_ARRAY_NAME)
    if said == TextFormat.TEXT:
        agreeing = (said, *_PERHAPS_TEXT)
    elif said == TextFormat.PARQUET:
        agreeing = (said,)
    elif said == TextFormat.JSON:
        agreeing = (TextFormat.JSON, TextFormat.JSON_LINES)
    if found in agreeing:
        return found if said == TextFormat.JSON and isinstance(found, TextFormat) else said
    named = "JSON" if said == TextFormat.JSON else _NAMES[said]
    if not isinstance(found, TextFormat):
        raise refuse(f"its name says {named}, its first bytes {found}", _settle(""))
    is_no_table = said == TextFormat.PARQUET and found == TextFormat.TEXT
    raise refuse(f"its name says {named}, its first bytes {_NAMES[found]}", _settle("" if is_no_table else found))


def _settle(form: str) -> str:
    remedy = f'Rename it, say data.format = "{form}", or leave it out' if form else "Convert it, or leave it out"
    return f"what is not recognised is not guessed. {remedy} with data.exclude"


def foreign_kind(head: bytes, wanted: Literal["text", "ids"]) -> tuple[str, str]:
    """Return what a file is that begins so and does not hold what is wanted, and what to do; empty if it is unknown."""
    for kind in _foreign_kinds():
        begins = (begin.encode("latin-1") for begin in kind["begins"])
        is_sought = kind.get("only", wanted) == wanted
        if is_sought and any(head.startswith(begin, kind.get("at", 0)) for begin in begins):
            return kind["name"], kind.get("advice", "")
    return "", ""


@cache
def _foreign_kinds() -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = tomllib.loads(_KINDS.read_text(encoding="utf-8"))["kinds"]
    return found


def _codec_of(head: bytes) -> str:
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    is_skippable = len(head) >= 4 and head[0] & 0xF0 == 0x50 and head[1:4] == b"\x2a\x4d\x18"
    return "zstd" if head.startswith(b"\x28\xb5\x2f\xfd") or is_skippable else ""


def _look(head: bytes) -> TextFormat | str:
    """Return the format that the bytes have, or the name of something else that they are."""
    if head.startswith(b"PAR1"):
        return TextFormat.PARQUET
    if again := _codec_of(head):
        return f"{again} once more"
    if foreign := foreign_kind(head, "text")[0]:
        return foreign
    if head.count(0) > max(_FEW_NULS, len(head) // 16):
        return "full of NUL bytes, as UTF-16 without a byte order mark and numbers are"
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if _HTML.match(text):
        return _HTML_NAME
    if _ARRAY.match(text):
        return TextFormat.JSON
    if _OTHER_ARRAY.match(text):
        return _OTHER_ARRAY_NAME
    if not text.startswith(b"{"):
        return TextFormat.TEXT
    line, newline, _ = text.partition(b"\n")
    is_cut = not newline and len(head) == HEAD_BYTES  # a long line, of which only this is known
    if not is_cut and _SPREAD_OBJECT.match(text):
        return _SPREAD_NAME
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        msgspec.json.decode(line.strip(), type=dict[str, msgspec.Raw])
        return TextFormat.JSON_LINES
    is_object = _BEGUN_OBJECT.match(line) and (is_cut or line.rstrip().endswith(b"}"))
    return TextFormat.JSON_LINES if is_object else TextFormat.TEXT


def skip_mark(text: BinaryIO) -> int:
    """Skip a byte order mark (UTF-8's) at the beginning, which is no text; return its size in bytes."""
    has_mark = cast(io.BufferedReader, text).peek(3)[:3] == codecs.BOM_UTF8
    return len(text.read(3)) if has_mark else 0


def lines_of(stream: BinaryIO, longest: int, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line with its end) of every line, from `offset` on; one of more than `longest` bytes is cut."""
    while line := stream.readline(longest + 2):
        length, ended = len(line), line.endswith(b"\n")
        while not ended and length >= longest + 2 and (rest := stream.readline(CHUNK_BYTES)):
            length, ended = length + len(rest), rest.endswith(b"\n")
        yield offset, line
        offset += length


def elements_of(stream: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of each element of a JSON array, a longer one cut; IntegrityError for anything else."""
    depth, offset, begin, is_quoted, is_over, element = 0, 0, 0, False, False, bytearray()
    while chunk := stream.read(CHUNK_BYTES):
        while chunk.endswith(b"\\") and (rest := stream.read(1)):  # an escape lies in one chunk
            chunk += rest
        last = 0
        for found in _STRUCTURE.finditer(chunk):
            at, token = found.start(), found[0]
            is_quoted ^= token == b'"'
            if is_quoted or token == b'"' or token.startswith(b"\\"):
                continue
            depth += token in (b"[", b"{")
            if is_over or (depth == 1 and token == b"{"):
                raise IntegrityError("it is not one JSON array")
            if depth == 1 and (token in (b",", b"]") or begin == 0):
                element += chunk[last:at]
                if not begin and element.strip().removeprefix(codecs.BOM_UTF8):
                    raise IntegrityError("it is not one JSON array")
                if begin and element.strip():
                    yield begin + len(element) - len(element.lstrip()), bytes(element.strip())
                element.clear()
                last, begin = at + 1, offset + at + 1
            is_over = depth == 1 and token == b"]"
            depth -= token in (b"]", b"}")
        element += chunk[last:] if depth else b""
        del element[longest + 2 :]
        offset += len(chunk)
    if not is_over:
        raise IntegrityError("its JSON array has no end" if begin else "it is not one JSON array")


def pieces_of(text: BinaryIO, longest: int, border: int | None = None, begin: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in bytes, content) of each piece of a text, cut at a paragraph or a line where there is one.

    A piece has at most `longest` bytes, and a character's rest where the piece ends at `border`: no piece lies on both
    sides of it, and none begins or ends within a UTF-8 character.
    """
    offset, held = begin, b""
    while held := held + text.read(longest + _LONGEST_CHARACTER_BYTES - len(held)):
        to_border = border - offset if border is not None else 0
        if 0 < to_border <= longest:
            end = next((at for at in range(to_border, len(held)) if _is_start(held[at])), len(held))
        else:
            end = _end_of_piece(held, longest)
        yield offset, held[:end]
        offset, held = offset + end, held[end:]


def _end_of_piece(held: bytes, longest: int) -> int:
    if len(held) <= longest:
        return len(held)
    for mark in _PARAGRAPHS_AND_LINES:
        if (found := held.rfind(mark, longest // 2, longest)) >= 0:
            return found + len(mark)
    ends = range(longest, longest - _LONGEST_CHARACTER_BYTES, -1)
    return next((end for end in ends if _is_start(held[end])), longest)


def _is_start(byte: int) -> bool:
    return byte & 0xC0 != 0x80
