"""The remote store through the real client against an S3 server on loopback."""

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from storage.checkpoint import newest_verified
from storage.errors import ObjectMissing, StorageError, StoreUnavailable
from storage.open_store import open_store
from storage.remote_store import RemoteStore
from storage.store_probe import probe_store
from tests.storage.builders import check_invariants, evaluated, open_run, run_log, run_with_commits, writer
from tests.storage.test_object_store import BAD_KEYS, OPERATIONS

PART_BYTES = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket on an S3 server in this process; skips where moto is absent."""
    server_class = pytest.importorskip("moto.server", reason="moto[server] is not installed").ThreadedMotoServer
    boto3 = pytest.importorskip("boto3")
    server = server_class(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    empty = tmp_path_factory.mktemp("aws") / "none"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
            patch.delenv(name)
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(empty),
            "AWS_SHARED_CREDENTIALS_FILE": str(empty),
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="cairn")
        yield "cairn"
        server.stop()


@pytest.fixture
def remote(bucket: str, request: pytest.FixtureRequest) -> RemoteStore:
    """A prefix of its own for each test."""
    opened = open_store(f"s3://{bucket}/{abs(hash(request.node.nodeid))}")
    assert isinstance(opened, RemoteStore)
    return opened


def test_create_makes_an_object_once(remote: RemoteStore) -> None:
    assert [remote.create("a/b", b"1"), remote.create("a/b", b"2"), remote.read("a/b")] == [True, False, b"1"]


def test_of_32_racing_creators_exactly_one_wins(remote: RemoteStore) -> None:
    barrier = threading.Barrier(32)

    def create(index: int) -> bool:
        barrier.wait()
        return remote.create("a/b", b"%d" % index)

    with ThreadPoolExecutor(32) as pool:
        won = list(pool.map(create, range(32)))
    assert won.count(True) == 1
    assert remote.read("a/b") == b"%d" % won.index(True)


def test_what_is_no_object_is_missing(remote: RemoteStore) -> None:
    remote.write("a/b/c", b"1")
    for key in ("a/x", "a/b", "never/there"):
        with pytest.raises(ObjectMissing, match=key):
            remote.read(key)
        assert remote.size(key) is None


def test_listing_is_sorted_complete_and_never_stale(remote: RemoteStore) -> None:
    assert (remote.keys("a"), remote.first("a")) == ([], None)
    for key in ("a/2", "a/10", "ab/1"):
        remote.write(key, b"")
    assert (remote.keys("a"), remote.first("a")) == (["a/10", "a/2"], "a/10")
    remote.write("a/1", b"")
    assert (remote.keys("a"), remote.first("a")) == (["a/1", "a/10", "a/2"], "a/1")


def test_size_is_in_bytes(remote: RemoteStore) -> None:
    remote.write("a/b", b"12345")
    remote.write("a/empty", b"")
    assert (remote.size("a/b"), remote.size("a/empty")) == (5, 0)


def test_an_object_written_by_somebody_else_is_seen_at_once(remote: RemoteStore, bucket: str) -> None:
    other = RemoteStore(remote.url)
    assert remote.size("a/b") is None
    other.write("a/b", b"1")
    assert (remote.size("a/b"), remote.read("a/b")) == (1, b"1")
    other.write("a/b", b"22")
    assert (remote.size("a/b"), remote.read("a/b")) == (2, b"22")


def test_deleting_what_is_not_there_is_no_error(remote: RemoteStore) -> None:
    remote.write("a/b", b"1")
    remote.delete("a/b")
    remote.delete("a/b")
    assert remote.keys("a") == []


@pytest.mark.parametrize(
    "sizes",
    [(), (0,), (3, 0, 4), (PART_BYTES,), (PART_BYTES - 1, 2, PART_BYTES + 5)],
    ids=lambda sizes: str(sum(sizes)),
)
def test_a_stream_is_one_object_hashed_as_it_is_written(remote: RemoteStore, sizes: tuple[int, ...]) -> None:
    chunks = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    written = remote.write_stream("a/b", iter(memoryview(chunk) for chunk in chunks))
    data = remote.read("a/b")
    assert data == b"".join(chunks)
    assert (written.bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("sent", [3, 2 * PART_BYTES + 1], ids=["before-the-first-part", "after-two-parts"])
def test_a_stream_that_breaks_leaves_no_object_and_no_upload(remote: RemoteStore, sent: int) -> None:
    class Broke(BaseException):
        pass

    def broken() -> Any:
        yield bytes(sent)
        raise Broke

    with pytest.raises(Broke):
        remote.write_stream("a/b", broken())
    assert (remote.keys("a"), remote.size("a/b")) == ([], None)
    bucket = remote._root.split("/")[0]
    uploads = remote._fs.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", [])
    assert [upload["Key"] for upload in uploads if remote._root.endswith(upload["Key"].split("/")[0])] == []


def test_a_run_opens_claims_commits_and_verifies(remote: RemoteStore) -> None:
    run_with_commits(remote, 5, 10)
    found = newest_verified(run_log(remote), writer=writer())
    assert found is not None
    assert found.step == 10
    check_invariants(remote, {found.prefix})


def test_threads_that_append_at_once_leave_one_contiguous_log(remote: RemoteStore) -> None:
    open_run(remote)

    def append(index: int) -> None:
        run_log(remote).append(lambda state: evaluated(index, 1.0), writer=writer())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    assert sorted(item.step for item in check_invariants(remote, set()).evaluations) == [0, 1, 2, 3]


def test_the_probe_accepts_it(remote: RemoteStore) -> None:
    probe_store(remote, rounds=1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_key_that_could_leave_the_root_is_refused(remote: RemoteStore, operation: str) -> None:
    for key in BAD_KEYS:
        with pytest.raises(StorageError, match="each segment must match"):
            OPERATIONS[operation](remote, key)


@pytest.mark.parametrize("operation", ["create", "write", "write_stream"])
def test_a_bucket_that_does_not_exist_is_unavailable(bucket: str, operation: str) -> None:
    with pytest.raises(StoreUnavailable, match="no-such-bucket"):
        OPERATIONS[operation](open_store("s3://no-such-bucket/x"), "a/b")


def test_a_url_says_where_the_store_is(bucket: str) -> None:
    assert open_store(f"s3://{bucket}/x/").url == f"s3://{bucket}/x"
