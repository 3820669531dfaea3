"""The children that parse files of unknown origin, forked: for tests of what they read, not of how they are bounded."""

from collections.abc import Iterator

import pytest

from tests.processes.fork_server import fork_server

PARSERS = (
    "cairn.model.data.tokenizer_file",
    "cairn.storage.snapshots.parquet_process",
    "cairn.tasks.data.chat_template",
    "tests.tasks.killed_build",  # not a parser, but beside them in its tests
)


@pytest.fixture(scope="module")
def forked_parsers() -> Iterator[None]:
    """Fork the parsers that the tests of a file start; each start takes up to 0.2 s of a core otherwise."""
    with fork_server(*PARSERS).forking():
        yield
