"""Where the tests marked `gpu` run: on CUDA, or where `CAIRN_TEST_DEVICE` says, to try the tests themselves."""

import os

import pytest
import torch

from cairn.model.training.determinism import resolve_device


def device_under_test() -> torch.device:
    """Return it; the test is skipped if it is not there."""
    name = os.environ.get("CAIRN_TEST_DEVICE", "cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return resolve_device(name)
