"""Every kind of store under one name; every test of the log and of checkpoints runs on each.

`s3` is the emulator of the default suite, `ceph` the real gateway of `make test-s3`, `gs` and `az` are fakes. Of files
in which the kind of store decides much, the default suite tries every case on all of them; of the others one case in
six on the emulator and one in twelve on the fakes. The slow part and the gateway have all.
"""

import uuid
from pathlib import Path

import pytest

from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.s3_bucket import S3Bucket
from cairn.storage.stores.s3_store import S3Store
from tests.clouds.servers import AZURITE, CLOUDS, cloud_server
from tests.full_amount import share_of
from tests.memory_store import MemoryStore
from tests.processes.forked_parsers import forked_parsers
from tests.s3.servers import CEPH, S3Server, s3_server

__all__ = ["forked_parsers"]
FOLDER = Path(__file__).parent
OWN = frozenset(
    FOLDER / room for room in ("stores/test_object_store.py", "logs/test_races.py", "stores/test_store_probe.py")
)
SHARES = ((("s3",), 6), (CLOUDS, 12))


@pytest.hookimpl(tryfirst=True)  # before the cases that are marked slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the default suite leaves to the slow part."""
    shared = [item for item in items if item.path.is_relative_to(FOLDER) and item.path not in OWN]
    for kinds, one_in in SHARES:
        for number, item in enumerate(item for item in shared if _store_of(item) in kinds):
            if number % share_of(one_in):
                item.add_marker(pytest.mark.slow)


def _store_of(item: pytest.Item) -> str:
    return str(item.callspec.params.get("store")) if hasattr(item, "callspec") else ""


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


@pytest.fixture(params=["memory", "local", "s3", CEPH, "gs", "az", AZURITE])
def store(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "memory":
        return MemoryStore("test")
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    if request.param in CLOUDS:
        return cloud_server(request.param, tmp_path_factory.getbasetemp()).store()
    return S3Store(request.getfixturevalue(f"{request.param}_bucket"), uuid.uuid4().hex)
