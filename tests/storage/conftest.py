"""Every kind of store under one name; every test of the log and of checkpoints runs on each.

`s3` is the emulator of the default suite, `ceph` the real gateway of `make test-s3`. Of files in which the kind of
store decides little, the default suite tries one case in four on the emulator; the slow part and the gateway have all.
"""

import uuid
from pathlib import Path

import pytest

from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.s3_bucket import S3Bucket
from cairn.storage.stores.s3_store import S3Store
from tests.full_amount import share_of
from tests.memory_store import MemoryStore
from tests.s3.servers import CEPH, S3Server, s3_server

SHARED = frozenset(map(Path(__file__).with_name, ("test_sweep.py", "test_resume_point.py", "test_hostile_store.py")))


@pytest.hookimpl(tryfirst=True)  # before the cases that are marked slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the default suite leaves to the slow part."""
    cases = [item for item in items if item.path in SHARED and hasattr(item, "callspec")]
    for number, item in enumerate(item for item in cases if item.callspec.params.get("store") == "s3"):
        if number % share_of(4):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def quick_server(tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """This process's S3 emulator."""
    return s3_server("quick", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def s3_bucket(quick_server: S3Server) -> S3Bucket:
    """A bucket on the emulator, through one client for all tests."""
    return quick_server.bucket()


@pytest.fixture(scope="session")
def ceph_server(tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """This process's real gateway."""
    return s3_server("ceph", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def ceph_bucket(ceph_server: S3Server) -> S3Bucket:
    """A bucket on the real gateway, through one client for all tests."""
    return ceph_server.bucket()


@pytest.fixture(params=["memory", "local", "s3", CEPH])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "memory":
        return MemoryStore("test")
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    return S3Store(request.getfixturevalue(f"{request.param}_bucket"), uuid.uuid4().hex)
