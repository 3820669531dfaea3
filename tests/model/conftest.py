"""The tests of the model run on one thread, and measure a peak by small products."""

from collections.abc import Iterator

import pytest
import torch

from cairn.model.estimates import utilization
from tests.processes.fork_server import SMALL_PRODUCTS


@pytest.fixture(autouse=True, scope="package")
def _quick_peak() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilization, "_CPU_SIZES", SMALL_PRODUCTS)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
