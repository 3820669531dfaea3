"""Which documents are held out, and what is said of their share."""

import hashlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.model.configuration.data import DataConfig
from cairn.tasks.data.document import InvalidCorpus, Piece, Source, require_both_splits, split_of
from cairn.tasks.text.format import describe_split

fractions = st.floats(min_value=0.001, max_value=0.999)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@given(text=st.text(), fractions=st.tuples(fractions, fractions))
def test_a_greater_fraction_never_moves_a_document_from_val_to_train(text: str, fractions: tuple[float, float]) -> None:
    small, great = sorted(fractions)
    assert split_of(digest(text), small) == "train" or split_of(digest(text), great) == "val"


def test_the_held_out_share_is_close_to_the_fraction() -> None:
    held = sum(split_of(digest(str(number)), 0.1) == "val" for number in range(10_000))
    assert 900 < held < 1100


def test_the_split_of_known_digests_is_fixed_for_ever() -> None:
    assert split_of("0" * 64, 0.1) == "val"
    assert split_of("f" * 64, 0.999) == "train"
    assert split_of("80" + "0" * 62, 0.5) == "train"
    assert split_of("7f" + "f" * 62, 0.5) == "val"


@pytest.mark.parametrize(
    ("train", "val", "own", "said"),
    [
        (3, 0, (), "data.val_fraction = 0.1: none of the 3 .* val split.*raise "),
        (0, 3, (), "data.val_fraction = 0.1: none of the 3 .* train split.*lower "),
        (3, 0, ("b",), "data.val_sources: none of the 3 .* val split.* Name other files"),
        (0, 3, ("b",), "data.val_sources: none of the 3 .* train split.* Name other files"),
    ],
)
def test_an_empty_split_is_refused_with_what_to_change(train: int, val: int, own: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidCorpus, match=said):
        require_both_splits(train, val, DataConfig(sources=("a",), val_sources=own))


def test_no_document_is_read_before_its_size_is_asked_for() -> None:
    def pieces() -> Iterator[Piece]:
        raise AssertionError("a source was read that nobody has asked")

    Source(name="later", bytes=1, sha256="", unit="module", pieces=pieces).sizes(0.1)


def test_a_share_near_the_one_asked_for_is_told_without_a_warning() -> None:
    assert describe_split(9_000, 1_100, "tokens", 0.1) == "9,000 tokens to train on, 1,100 held out"


def test_a_text_that_fell_into_val_as_a_whole_is_warned_of() -> None:
    told = describe_split(1_400_000, 14_900_000, "tokens", 0.1)
    assert "warning: that is 91.4%, not data.val_fraction = 0.1" in told and "data.split = 'end'" in told


def test_far_too_little_held_out_is_warned_of_too() -> None:
    assert "warning: that is 1.0%" in describe_split(9_900, 100, "bytes", 0.1)
