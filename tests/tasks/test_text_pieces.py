import io

from hypothesis import given
from hypothesis import strategies as st

from cairn.tasks.data.text_format import pieces_of

LINES = st.lists(st.sampled_from(["", "one", "zwei höher", "三 四", "x" * 30]), max_size=30).map("\n".join)


@given(text=LINES, longest=st.integers(8, 60), share=st.floats(0, 1))
def test_the_pieces_together_are_the_text_and_each_is_whole_characters(text: str, longest: int, share: float) -> None:
    content = text.encode()
    border = int(len(content) * share)
    found = list(pieces_of(io.BytesIO(content), longest, border))
    assert b"".join(piece for _, piece in found) == content
    assert [offset for offset, _ in found] == [sum(len(piece) for _, piece in found[:n]) for n in range(len(found))]
    assert all(piece.decode() and len(piece) <= longest + 3 for _, piece in found)


@given(text=LINES, longest=st.integers(8, 60), share=st.floats(0, 1))
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
