"""The cut of shards into windows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import InvalidInput, TokenOutOfRange


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7), st.sampled_from([np.uint16, np.uint32]))
def test_windows_are_those_of_the_concatenation_however_it_is_sharded(lengths, block_size, dtype) -> None:
    total = sum(lengths)
    tokens = np.arange(total, dtype=dtype)
    shards = np.split(tokens, np.cumsum(lengths)[:-1])
    count = max(0, total - 1) // block_size
    if count == 0:
        with pytest.raises(InvalidInput, match="shorter than the data"):
            TokenWindows(shards, block_size, 1000)
        return
    windows = TokenWindows(shards, block_size, 1000)
    expected = [tokens[i * block_size : i * block_size + block_size + 1].tolist() for i in range(count)]
    assert windows.window_count == count and windows.gather(np.arange(count)).tolist() == expected


def test_gather_keeps_the_order_of_the_indexes() -> None:
    windows = TokenWindows([np.arange(13, dtype=np.uint16)], 4, 13)
    assert windows.gather(np.array([2, 0, 2]))[:, 0].tolist() == [8, 0, 8]


def test_gathered_ids_are_int64() -> None:
    assert TokenWindows([np.arange(13, dtype=np.uint16)], 4, 13).gather(np.array([1])).dtype == np.int64


def test_a_memory_map_is_read_in_place(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "shard")
    mapped = np.memmap(tmp_path / "shard", dtype=np.uint16, mode="r")
    windows = TokenWindows([mapped], 4, 100)
    assert windows.gather(np.array([5]))[0].tolist() == [20, 21, 22, 23, 24]
    assert windows._shards[0] is mapped


def test_a_token_outside_the_vocabulary_is_an_error_that_names_its_window() -> None:
    tokens = np.arange(13, dtype=np.uint32)
    tokens[6] = 70_000
    with pytest.raises(TokenOutOfRange, match="window 1: token id 70000") as caught:
        TokenWindows([tokens], 4, 13).gather(np.array([2, 1]))
    assert caught.value.window == 1


def test_a_window_of_a_higher_number_begins_some_tokens_later() -> None:
    windows = TokenWindows([np.arange(6, dtype=np.uint16), np.arange(6, 13, dtype=np.uint16)], 4, 13)
    assert windows.gather(np.array([3, 3 + 1, 2 * 3, 3 * 3 + 1]))[:, 0].tolist() == [1, 5, 2, 7]
    assert windows.gather(np.array([3 * 3 + 1])).tolist() == [[7, 8, 9, 10, 11]]


@pytest.mark.parametrize("index", [-1, 12, 5])
def test_a_window_outside_the_data_is_refused(index) -> None:
    with pytest.raises(InvalidInput, match=rf"window {index} .*\[0, 3\)"):
        TokenWindows([np.arange(13, dtype=np.uint16)], 4, 13).gather(np.array([index]))
