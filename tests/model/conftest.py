"""A tiny training set-up for the model tests, on one thread."""

from collections.abc import Iterator

import pytest
import torch

from tests.model.tiny_run import TinyRun


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny_run() -> type[TinyRun]:
    """Give the class, so that a test names its own settings."""
    return TinyRun
