"""A store in a folder, and the library whose networks ours are compared with."""

import importlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cairn.storage.stores.local_store import LocalStore
from tests.processes.forked_parsers import forked_parsers

__all__ = ["forked_parsers", "store", "transformers"]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture(scope="module")
def transformers() -> Iterator[ModuleType]:
    """The real library, told to stay offline."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
        warnings.simplefilter("ignore")
        yield importlib.import_module("transformers")
