"""Cuts a stream of text into lines, elements of a JSON array, and pieces that end at a paragraph where there is one."""

import io
import re
from collections.abc import Iterator
from typing import BinaryIO, cast

from cairn.storage.errors import IntegrityError
from cairn.tasks.data.text_format import BYTE_ORDER_MARK

CHUNK_BYTES = 1 << 20
_PARAGRAPHS_AND_LINES = (b"\n\n", b"\n\r\n", b"\n")
_LONGEST_CHARACTER_BYTES = 4
_STRUCTURE = re.compile(rb'\\.|["\[\]{},]', re.S)


def skip_mark(text: BinaryIO) -> int:
    """Skip a byte order mark (UTF-8's) at the beginning, which is no text; return its size in bytes."""
    has_mark = cast(io.BufferedReader, text).peek(3)[:3] == BYTE_ORDER_MARK
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
                if not begin and element.strip().removeprefix(BYTE_ORDER_MARK):
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


def pieces_of(
    text: BinaryIO, longest: int, border: int | None = None, *, begin: int = 0
) -> Iterator[tuple[int, bytes]]:
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
