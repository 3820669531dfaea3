"""Several transfers at a time: threads that read, write and hash."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from typing import Any

Run = Callable[..., Callable[[], Any]]
"""Starts a function and returns a function that waits for its result."""


@contextmanager
def transfers(count: int, thread_start: Callable[[], None] | None = None) -> Iterator[Run]:
    """Yield a `Run` that works in `count` threads, `thread_start` first in each, or in the caller's if it is 1.

    An error in the block drops what has not begun.
    """
    if count == 1:
        yield lambda function, *arguments: repeat(function(*arguments)).__next__
        return
    pool = ThreadPoolExecutor(count, "transfer", initializer=thread_start)
    try:
        yield lambda function, *arguments: pool.submit(function, *arguments).result
    finally:
        pool.shutdown(cancel_futures=True)
