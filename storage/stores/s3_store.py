"""A store in an S3 bucket: one request per small operation, ranges and parts for large objects.

`create` is a single PUT with If-None-Match: * (RFC 9110, section 13.1.2), the only condition that every sound server
honours. Any answer but success and 412 is unknown; the log settles it by reading back. All other requests are
idempotent and are retried for some seconds.
"""

import io
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import chain
from typing import Any

from cairn.storage.errors import IntegrityError, ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from cairn.storage.stores import object_store, ranged_store, s3_bucket
from cairn.storage.stores.object_store import PART_BYTES, UnfinishedWrite, is_key

PAGE_KEYS = 1000
CONCURRENT_PARTS = 3
_MAX_PARTS = 10_000
_TOKEN = "cairn-write"
_SPARE = deque[bytearray](maxlen=2 * (CONCURRENT_PARTS + 1))
"""Parts that were sent: memory that is used again costs no page faults, which take longer than copying does."""
_MARKERS = {
    "list_objects_v2": ("ContinuationToken",),
    "list_multipart_uploads": ("KeyMarker", "UploadIdMarker"),
    "list_parts": ("PartNumberMarker",),
}
"""The parameters that say where the next page begins; an answer gives each with `Next` before its name."""
_RETRY_POLICY = object_store.RetryPolicy()


class S3Store(ranged_store.RangedStore):
    """An `ObjectStore` below one prefix of a bucket."""

    def __init__(
        self, bucket: s3_bucket.S3Bucket, prefix: str = "", *, retry_policy: object_store.RetryPolicy = _RETRY_POLICY
    ) -> None:
        """Use the objects below `prefix`; every request but that of `create` is retried by itself."""
        self._bucket, self._retry_policy, self._root = bucket, retry_policy, f"s3://{bucket.name}"
        self._below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def read(self, key: str, *, at_most_bytes: int = object_store.MAX_READ_BYTES) -> bytes:
        """Return the object's bytes in one GET; raises ObjectMissing, or IntegrityError for a larger object."""
        return self._retry_policy.call(self._bucket.fetch, self._name(key), at_most_bytes=at_most_bytes).data

    def create(self, key: str, data: bytes) -> bool:
        """Create the object if it is absent, in one PUT; returns False if it exists."""
        with suppress(s3_bucket.ConditionFailed):
            self._bucket.request("create", "put_object", Key=self._name(key), Body=data, IfNoneMatch="*")
            return True
        return False

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite the object in one PUT."""
        name, seconds = self._name(key), s3_bucket.upload_seconds(len(data))
        for attempt in self._retry_policy.attempts():
            body = io.BytesIO(data) if len(data) >= 1 << 20 else data  # a file is sent in pieces, without a copy
            with attempt:
                self._bucket.request("write", "put_object", seconds=seconds, Key=name, Body=body)

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write chunks as one object, in parts above 16 MiB; returns its bytes. An error leaves nothing behind."""
        parts = _regroup(chunks)
        first_parts = [part for part in (next(parts, b""), next(parts, None)) if part is not None]
        if len(first_parts) == 2:
            # pop() keeps no reference to a part that is sent.
            upload = _Upload(self._bucket, self._name(key), self._retry_policy)
            return upload.send(chain(map(first_parts.pop, (0, 0)), parts))
        self.write(key, bytes(first_parts[0]))
        return len(first_parts[0])

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of every object below the folder `prefix`, in one request per thousand."""
        return dict(sorted((key, item["Size"]) for key, item in self._objects(prefix)))

    def folders(self, prefix: str) -> list[str]:
        """Return the folders directly below the folder `prefix`, sorted; their objects are not listed."""
        asked = {"Prefix": self._name(prefix) + "/", "MaxKeys": PAGE_KEYS, "Delimiter": "/"}
        pages = self._pages("list_objects_v2", asked)
        found = [folder["Prefix"] for page in pages for folder in page.get("CommonPrefixes", ())]
        return sorted(filter(is_key, (self._key(name.rstrip("/")) for name in found)))

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly below the folder `prefix`, in one request unless folders precede it."""
        return next((key for key, _ in self._objects(prefix, first_page={"MaxKeys": 1}, Delimiter="/")), None)

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None if it is absent."""
        with suppress(ObjectMissing):
            return int(self._request("stat", "head_object", Key=self._name(key))["ContentLength"])
        return None

    def age_seconds(self, key: str) -> float | None:
        """Return the whole seconds between two times of one answer of the server: its own, and the object's."""
        with suppress(ObjectMissing):
            answer = self._request("stat", "head_object", Key=self._name(key))
            if now := _server_time(answer):
                return float((now - answer["LastModified"]).total_seconds())
        return None

    def delete(self, key: str) -> None:
        """Delete the object if it exists, in one request."""
        with suppress(ObjectMissing):
            self._request("delete", "delete_object", Key=self._name(key))

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete these objects, a thousand in one request; one by one where the store does not do that."""
        for start in range(0, len(keys), PAGE_KEYS):
            page = keys[start : start + PAGE_KEYS]
            doomed = {"Objects": [{"Key": self._name(key)} for key in page], "Quiet": True}
            seconds = s3_bucket.SILENCE_SECONDS
            try:
                left = self._request("delete", "delete_objects", seconds=seconds, Delete=doomed).get("Errors")
            except StoreRefused:
                left = page
            for key in page if left else ():
                self.delete(key)  # says for which of them, and why

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        """Return the multipart uploads below the folder `prefix`; their age is by the store's clock."""
        folder, found = self._name(prefix) + "/", []
        for page in self._pages("list_multipart_uploads", {"Prefix": folder}):
            now = _server_time(page) or datetime.now(UTC)
            for upload in page.get("Uploads", ()):
                name, token = upload["Key"], upload["UploadId"]
                if name.startswith(folder) and is_key(key := self._key(name)):
                    age_seconds, size_bytes = max(0.0, (now - upload["Initiated"]).total_seconds()), 0
                    with suppress(ObjectMissing):
                        asked = {"Key": name, "UploadId": token}
                        pages = self._pages("list_parts", asked, first_page={"PartNumberMarker": 0})
                        size_bytes = sum(part["Size"] for page in pages for part in page.get("Parts", ()))
                    found.append(UnfinishedWrite(key=key, bytes=size_bytes, age_seconds=age_seconds, token=token))
        return sorted(found, key=lambda write: (write.key, write.token))

    def discard(self, write: UnfinishedWrite) -> None:
        """Abort a multipart upload if it still exists."""
        with suppress(ObjectMissing):
            self._request("discard", "abort_multipart_upload", Key=self._name(write.key), UploadId=write.token)

    def _request(self, action: str, method: str, **parameters: Any) -> dict[str, Any]:
        return self._retry_policy.call(self._bucket.request, action, method, **parameters)

    def _fetch_range(self, name: str, start: int, size: int, etag: str | None = None) -> ranged_store.Fetched:
        condition: dict[str, Any] = {} if etag is None else {"IfMatch": etag}
        try:
            return self._bucket.fetch(name, at_most_bytes=size, Range=f"bytes={start}-{start + size - 1}", **condition)
        except s3_bucket.ConditionFailed as changed:
            raise IntegrityError(f"s3://{self._bucket.name}/{name}: was replaced while it was read") from changed
        except StoreUnavailable as error:
            if etag or s3_bucket.error_code(error.__cause__ or error) not in {"InvalidRange", "416"}:
                raise
            return ranged_store.Fetched(data=b"", etag="", total_bytes=0)  # an answer, not a fault to wait out

    def _objects(
        self, prefix: str, *, first_page: Mapping[str, Any] | None = None, **parameters: Any
    ) -> Iterator[tuple[str, Any]]:
        parameters |= {"Prefix": self._name(prefix) + "/", "MaxKeys": PAGE_KEYS}
        for page in self._pages("list_objects_v2", parameters, first_page=first_page):
            # A console writes an object whose name ends in "/" for a folder: that is not a key.
            yield from ((key, item) for item in page.get("Contents", ()) if is_key(key := self._key(item["Key"])))

    def _pages(
        self, method: str, parameters: Mapping[str, Any], *, first_page: Mapping[str, Any] | None = None
    ) -> Iterator[Mapping[str, Any]]:
        markers: dict[str, Any] = {}
        while True:
            page = self._request("list", method, **{**parameters, **(markers or first_page or {})})
            yield page
            before = markers
            markers = {name: page[f"Next{name}"] for name in _MARKERS[method] if page.get(f"Next{name}")}
            if not page.get("IsTruncated") or not markers or markers == before:
                return


def _server_time(answer: Mapping[str, Any]) -> datetime | None:
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(date) if date else None


def _regroup(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | bytearray]:
    """Yield parts of PART_BYTES, the last one shorter; a chunk is copied and may change afterwards."""
    part, filled = _new_part(), 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B") if memoryview(chunk).nbytes else memoryview(b"")
        while view.nbytes:
            taken = min(view.nbytes, PART_BYTES - filled)
            memoryview(part)[filled : filled + taken] = view[:taken]
            view, filled = view[taken:], filled + taken
            if filled == PART_BYTES:
                yield part
                part, filled = _new_part(), 0
    if filled:
        yield bytes(memoryview(part)[:filled])
    _SPARE.append(part)


def _new_part() -> bytearray:
    with suppress(IndexError):
        if len(part := _SPARE.pop()) == PART_BYTES:
            return part
    return bytearray(PART_BYTES)


class _Upload:
    """A multipart upload of a stream of unknown length, in bounded memory.

    Source: Amazon S3 user guide, "Uploading and copying objects using multipart upload". Stores disagree about
    conditional headers here: none is sent.
    """

    def __init__(self, bucket: s3_bucket.S3Bucket, key: str, retry_policy: object_store.RetryPolicy) -> None:
        self._bucket, self._key, self._retry_policy, self._token = bucket, key, retry_policy, uuid.uuid4().hex
        self._sent, self._size_bytes = deque[tuple[int, bytes | bytearray, "Future[Any]"]](), 0
        self._id = self._request("upload", "create_multipart_upload", Metadata={_TOKEN: self._token})["UploadId"]

    def send(self, parts: Iterator[bytes | bytearray]) -> int:
        """Upload the parts and complete or abort the upload; returns their bytes."""
        etags: list[str] = []
        try:
            for number, data in enumerate(parts, 1):
                if number > _MAX_PARTS:
                    raise StorageError(f"{self._key}: more than {_MAX_PARTS * PART_BYTES} bytes; write smaller shards")
                if len(self._sent) == CONCURRENT_PARTS:
                    etags.append(self._settle_oldest())
                self._sent.append((number, data, self._start_part(number, data)))
                self._size_bytes += len(data)
            while self._sent:
                etags.append(self._settle_oldest())
            self._complete(etags)
            return self._size_bytes
        except BaseException:
            # Cancelled before the abort: the server would keep, and bill, a part that arrives after it.
            for _, _, answer in self._sent:
                answer.cancel()
            with suppress(StorageError):
                self._request("abort", "abort_multipart_upload", UploadId=self._id)
            raise

    def _start_part(self, number: int, data: bytes | bytearray) -> "Future[Any]":
        seconds = s3_bucket.upload_seconds(len(data) * CONCURRENT_PARTS)
        parameters = {"Key": self._key, "UploadId": self._id, "PartNumber": number, "Body": data}
        return self._bucket.start_request("upload", "upload_part", seconds=seconds, **parameters)

    def _settle_oldest(self) -> str:
        """Wait for the oldest part, with retries; return its ETag."""
        number, data, sent = self._sent[0]
        first_answer, failed = [sent], list[StorageError]()

        def send() -> Any:
            return s3_bucket.wait_for(first_answer.pop() if first_answer else self._start_part(number, data))

        policy = replace(self._retry_policy, on_retry=lambda error, seconds: failed.append(error))
        etag = str(policy.call(send)["ETag"])
        self._sent.popleft()
        if isinstance(data, bytearray) and not failed:  # a try that was given up may still be reading it
            _SPARE.append(data)
        return etag

    def _complete(self, etags: list[str]) -> None:
        parts = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]}
        upload = {"UploadId": self._id, "MultipartUpload": parts, "seconds": s3_bucket.SILENCE_SECONDS}
        try:
            self._request("upload", "complete_multipart_upload", **upload)
        except StoreRefused:
            raise
        except (ObjectMissing, StoreUnavailable) as unknown:
            # The upload is gone or the answer was lost: it succeeded if the object is this one.
            found: dict[str, Any] = {}
            with suppress(ObjectMissing):
                found = self._request("stat", "head_object")
            if found.get("ContentLength") != self._size_bytes or found.get("Metadata", {}).get(_TOKEN) != self._token:
                raise StoreUnavailable(f"s3://{self._bucket.name}/{self._key}: cannot upload: {unknown}") from unknown

    def _request(self, action: str, method: str, **parameters: Any) -> dict[str, Any]:
        return self._retry_policy.call(self._bucket.request, action, method, Key=self._key, **parameters)
