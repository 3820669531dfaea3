"""The store that needs a client: S3 through s3fs."""

import hashlib
import os
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.errors import IntegrityError, StorageError, StoreFull, StoreRefused, StoreUnavailable
from cairn.storage.stores.object_store import PART_BYTES, RetryPolicy, write_hashed
from cairn.storage.stores.open_store import open_store
from cairn.storage.stores.s3_bucket import S3Bucket, convert_error
from cairn.storage.stores.s3_store import CONCURRENT_PARTS, S3Store
from tests.s3.servers import CEPH, S3Server, aws_environment
from tests.storage.store_operations import OPERATIONS

SMALL_PART_BYTES = 5 * 1024 * 1024
SMALL_READ_BYTES = 512 * 1024
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["s3", CEPH])
def bucket(request: pytest.FixtureRequest) -> S3Bucket:
    """The bucket of each server."""
    found: S3Bucket = request.getfixturevalue(f"{request.param}_bucket")
    return found


@pytest.fixture
def remote(bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A prefix of its own for each test, without retries, in the smallest parts S3 allows and in small pieces."""
    monkeypatch.setattr("cairn.storage.stores.s3_store.PART_BYTES", SMALL_PART_BYTES)
    monkeypatch.setattr("cairn.storage.stores.ranged_store.READ_CHUNK_BYTES", SMALL_READ_BYTES)
    return S3Store(bucket, uuid.uuid4().hex, retry_policy=RetryPolicy(tries=1))


@pytest.fixture(scope="module")
def absent_bucket(quick_server: S3Server) -> S3Bucket:
    """A client of a bucket that nobody made."""
    return quick_server.bucket(name="no-such-bucket")


@pytest.fixture
def environment(quick_server: S3Server) -> Iterator[dict[str, str]]:
    """The AWS variables that lead to the emulator, set."""
    with aws_environment(quick_server.environment()):
        yield quick_server.environment()


def test_a_url_leads_to_the_bucket_by_the_usual_variables(environment: dict[str, str]) -> None:
    store = open_store(f"s3://cairn/{uuid.uuid4().hex}/")
    store.write("a/b", b"1")
    assert isinstance(store, S3Store)
    assert (open_store(store.url).read("a/b"), store.url.endswith("/")) == (b"1", False)


def test_a_bucket_is_a_store_without_a_prefix(bucket: S3Bucket) -> None:
    store, folder = S3Store(bucket), uuid.uuid4().hex
    store.write(f"{folder}/a", b"1")
    assert (store.url, store.keys(folder), store.first(folder)) == ("s3://cairn", [f"{folder}/a"], f"{folder}/a")


def test_the_region_is_taken_from_either_variable(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_REGION", "eu-west-7")
    found = S3Bucket("cairn")
    found.request("list", "list_objects_v2")
    assert found._client.s3.meta.region_name == "eu-west-7"


def test_a_listing_of_many_pages_is_whole(remote: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.storage.stores.s3_store.PAGE_KEYS", 10)
    keys = [f"a/{number:04}" for number in range(43)]
    for key in keys:
        remote.write(key, b"")
    assert remote.keys("a") == keys


def test_a_folder_made_by_a_console_is_no_object(remote: S3Store, bucket: S3Bucket) -> None:
    bucket.request("write", "put_object", Key=f"{remote._below}a/", Body=b"")
    assert (remote.keys("a"), remote.first("a"), remote.folders("a")) == ([], None, [])


def test_an_object_written_by_somebody_else_is_seen_at_once(remote: S3Store, bucket: S3Bucket) -> None:
    other = S3Store(bucket, remote._below)
    assert (remote.size("a/b"), remote.keys("a")) == (None, [])
    other.write("a/b", b"1")
    assert (remote.size("a/b"), remote.keys("a"), remote.read("a/b")) == (1, ["a/b"], b"1")
    other.write("a/b", b"22")
    assert (remote.size("a/b"), remote.read("a/b")) == (2, b"22")


@pytest.mark.parametrize(
    "sizes",
    [(), (0,), (3, 0, 4), (SMALL_PART_BYTES,), (SMALL_PART_BYTES - 1, 2, SMALL_PART_BYTES + 5)],
    ids=lambda sizes: str(sum(sizes)),
)
def test_a_stream_is_one_object_hashed_as_it_is_written(remote: S3Store, sizes: tuple[int, ...]) -> None:
    chunks = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    written = write_hashed(remote, "a/b", iter(memoryview(chunk) for chunk in chunks))
    data = remote.read("a/b")
    assert data == b"".join(chunks)
    assert (written.bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert remote.unfinished("a") == []


def test_a_chunk_may_be_reused_once_the_next_one_is_asked_for(remote: S3Store) -> None:
    def chunks() -> Iterator[memoryview]:
        buffer = bytearray(SMALL_PART_BYTES // 2)
        for number in range(5):
            buffer[:] = bytes([number]) * len(buffer)
            yield memoryview(buffer)

    remote.write_stream("a/b", chunks())
    expected = b"".join(bytes([number]) * (SMALL_PART_BYTES // 2) for number in range(5))
    assert hashlib.sha256(remote.read("a/b")).digest() == hashlib.sha256(expected).digest()


class SlowBucket:
    """Answers a part only when another one may not be sent before; remembers how many bytes were under way at most."""

    name = "slow"

    def __init__(self) -> None:
        self.under_way: list[Future[dict[str, str]]] = []
        self.most = self.parts = 0

    def start_request(self, action: str, method: str, **parameters: Any) -> "Future[dict[str, str]]":
        self.parts += 1
        self.under_way = [answer for answer in self.under_way if not answer.done()] + [Answered()]
        self.most = max(self.most, len(self.under_way))
        return self.under_way[-1]

    def request(self, action: str, method: str, **parameters: Any) -> dict[str, str]:
        return {"UploadId": "1"}


class Answered(Future):  # type: ignore[type-arg]
    """Answers when it is waited for."""

    def result(self, timeout: float | None = None) -> dict[str, str]:
        if not self.done():
            self.set_result({"ETag": "e"})
        return {"ETag": "e"}


def test_a_stream_of_300_mb_holds_a_few_parts_at_once() -> None:
    bucket: Any = SlowBucket()
    chunk = bytes(1 << 20)
    written = S3Store(bucket, retry_policy=RetryPolicy(tries=1)).write_stream("a", (chunk for _ in range(300)))
    assert (written, bucket.parts, bucket.most) == (300 << 20, 19, CONCURRENT_PARTS)
    assert SMALL_PART_BYTES <= PART_BYTES and (CONCURRENT_PARTS + 1) * PART_BYTES < 80_000_000


class LosingBucket(SlowBucket):
    """Loses the first answer to its first part; notes the memory of every part it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[object] = []

    def start_request(self, action: str, method: str, **parameters: Any) -> "Future[dict[str, str]]":
        self.memory.append(parameters["Body"])
        if len(self.memory) > 1:
            return super().start_request(action, method, **parameters)
        lost: Future[dict[str, str]] = Future()
        lost.set_exception(StoreUnavailable("lost"))
        return lost


def test_memory_that_a_try_given_up_may_still_be_sending_is_not_used_for_another_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spare = deque[bytearray]()
    monkeypatch.setattr("cairn.storage.stores.s3_store._SPARE", spare)
    monkeypatch.setattr("cairn.storage.stores.s3_store.PART_BYTES", 1024)
    bucket: Any = LosingBucket()
    policy = RetryPolicy(tries=2, sleep=lambda seconds: None)
    S3Store(bucket, retry_policy=policy).write_stream("a", [bytes(3 * 1024)])
    twice, *once = bucket.memory[:3]
    assert bucket.memory[3] is twice
    assert not any(part is twice for part in spare) and all(any(part is one for part in spare) for one in once)


@pytest.mark.slow
def test_a_stream_of_300_mb_needs_the_memory_of_a_few_parts(environment: dict[str, str]) -> None:
    code = (
        "import resource, sys; from cairn.storage.stores.open_store import open_store\n"
        "store = open_store(sys.argv[1]); store.write_stream('a/b', [b'1'])\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before, chunk = peak(), bytes(1 << 20)\n"
        "written = store.write_stream('a/b', (chunk for _ in range(300)))\n"
        "assert written == store.size('a/b') == 300 << 20\n"
        "store.delete('a/b'); print(peak() - before)"
    )
    command = [sys.executable, "-c", code, f"s3://cairn/{uuid.uuid4().hex}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150_000_000


def test_a_part_is_not_hashed_for_its_signature_and_a_small_object_is(remote: S3Store, bucket: S3Bucket) -> None:
    hashes = dict[str, bytes]()

    def note(request: Any, event_name: str, **_: object) -> None:
        hashes[event_name.rpartition(".")[2]] = request.headers["X-Amz-Content-SHA256"]

    events = bucket._client.s3.meta.events
    events.register("before-send.s3", note)
    try:
        remote.write_stream("a/b", [bytes(SMALL_PART_BYTES + 1)])
        assert remote.create("a/c", b"1")
    finally:
        events.unregister("before-send.s3", note)
    digest = hashlib.sha256(b"1").hexdigest().encode()
    assert (hashes["UploadPart"], hashes["PutObject"]) == (b"UNSIGNED-PAYLOAD", digest)


@pytest.mark.parametrize("sent", [3, 2 * SMALL_PART_BYTES + 1], ids=["before-the-first-part", "after-two-parts"])
def test_a_stream_that_breaks_leaves_no_object_and_no_upload(remote: S3Store, sent: int) -> None:
    class Broke(BaseException):
        pass

    def broken() -> Any:
        yield bytes(sent)
        raise Broke

    with pytest.raises(Broke):
        remote.write_stream("a/b", broken())
    assert (remote.keys("a"), remote.size("a/b"), remote.unfinished("a")) == ([], None, [])


@pytest.mark.parametrize("size", [0, 1, SMALL_READ_BYTES, SMALL_READ_BYTES + 1, 3 * SMALL_READ_BYTES + 7])
def test_an_object_is_read_in_pieces_of_bounded_size(remote: S3Store, size: int) -> None:
    data = os.urandom(size)
    remote.write("a/b", data)
    chunks = list(remote.read_chunks("a/b"))
    assert b"".join(chunks) == data
    assert max(map(len, chunks), default=0) <= SMALL_READ_BYTES


def test_an_object_replaced_while_it_is_read_is_refused(remote: S3Store) -> None:
    remote.write("a/b", bytes(5 * SMALL_READ_BYTES))
    chunks = remote.read_chunks("a/b")
    next(chunks)
    remote.write("a/b", bytes([1]) * (5 * SMALL_READ_BYTES))
    with pytest.raises(IntegrityError, match="replaced while it was read"):
        list(chunks)


def test_an_upload_nobody_finished_is_named_with_its_bytes_and_can_be_discarded(
    remote: S3Store, bucket: S3Bucket
) -> None:
    for name in ("a/b", "ab/c"):
        key = remote._below + name
        upload = bucket.request("upload", "create_multipart_upload", Key=key)["UploadId"]
        bucket.request("upload", "upload_part", Key=key, UploadId=upload, PartNumber=1, Body=b"123")
    (left,) = remote.unfinished("a")
    assert (left.key, left.bytes) == ("a/b", 3)
    assert left.age_seconds >= 0
    for _ in range(2):
        remote.discard(left)
    assert remote.unfinished("a") == []
    assert len(remote.unfinished("ab")) == 1


@pytest.mark.s3
def test_an_unfinished_upload_is_as_old_as_the_server_says(ceph_bucket: S3Bucket) -> None:
    store = S3Store(ceph_bucket, uuid.uuid4().hex)
    ceph_bucket.request("upload", "create_multipart_upload", Key=f"{store._below}a/b")
    assert store.unfinished("a")[0].age_seconds < 300


def test_many_unfinished_uploads_are_all_named(remote: S3Store, bucket: S3Bucket) -> None:
    names = [f"a/{number:02}" for number in range(12)]
    for name in names:
        bucket.request("upload", "create_multipart_upload", Key=remote._below + name)
    assert [write.key for write in remote.unfinished("a")] == names


@pytest.mark.parametrize("operation", ["read", "create", "write", "write_stream", "keys", "folders", "first"])
def test_a_bucket_that_does_not_exist_is_refused(absent_bucket: S3Bucket, operation: str) -> None:
    with pytest.raises(StoreRefused, match=r"no-such-bucket.*create the bucket"):
        OPERATIONS[operation](S3Store(absent_bucket, "x"), "a/b")


ELSEWHERE = {"AWS_ENDPOINT_URL": "https://127.0.0.1:9"}
NO_ADDRESSES = ("127.0.0.1:9", "https://[::1", "ftp://127.0.0.1:9", "http://127.0.0.1:port")
UNSET = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (UNSET, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
        ({"AWS_PROFILE": "nobody"}, r"nobody.*correct AWS_PROFILE"),
        *(({"AWS_ENDPOINT_URL": endpoint}, "correct AWS_ENDPOINT_URL") for endpoint in NO_ADDRESSES),
        *(
            ({**ELSEWHERE, "AWS_CA_BUNDLE": name}, f"; AWS_CA_BUNDLE = '{name}': must be a readable PEM file")
            for name in ("missing.pem", "no-certificate.pem")
        ),
    ],
)
def test_variables_that_lead_to_no_bucket_are_refused_with_what_to_set(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    words: str,
) -> None:
    (tmp_path / "no-certificate.pem").write_text("no certificate")
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(StoreRefused, match=words):
        open_store("s3://cairn").keys("a")


@pytest.mark.s3
@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_refused_without_repeating_them(
    ceph_server: S3Server, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with aws_environment(ceph_server.environment()):
        monkeypatch.setenv(wrong, "canary-of-a-secret")
        with pytest.raises(StoreRefused, match="AWS_ACCESS_KEY_ID") as refused:
            S3Store(S3Bucket("cairn"), "x").read("a/b")
    assert "canary" not in str(refused.value)


def test_credentials_in_the_endpoint_are_not_repeated(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:canary-of-a-secret@127.0.0.1:9")
    with pytest.raises(StorageError) as refused:
        S3Store(S3Bucket("cairn"), "x", retry_policy=RetryPolicy(tries=1)).read("a/b")
    assert "canary" not in str(refused.value)


class CodedError(Exception):
    """An error of the client's, with the server's code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


FULL = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "EDQUOT", "507")


@pytest.mark.parametrize("action", ["create", "write", "upload"])
@pytest.mark.parametrize("code", FULL)
def test_a_full_bucket_or_quota_is_a_full_store(code: str, action: str) -> None:
    error = convert_error(CodedError(code), action=action, where="s3://cairn/a")
    assert type(error) is StoreFull and "free space and run the same command again" in str(error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CodedError("AccessDenied"), StoreRefused),
        (CodedError("SlowDown"), StoreUnavailable),
        (ValueError("a bug"), StoreUnavailable),
    ],
)
def test_another_error_is_not_a_full_store(error: Exception, kind: type[StorageError]) -> None:
    assert type(convert_error(error, action="write", where="s3://cairn/a")) is kind
