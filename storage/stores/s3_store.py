"""A store in an S3 bucket: one request per small operation, pieces for everything large.

Owns the mapping from keys to objects. The one conditional write used is a single small PUT with If-None-Match: *
(RFC 9110, section 13.1.2), the only one every sound server honours; any other answer than a clean success or a
clean 412 is left to the log to settle by reading back. Refuses to know clients, codes and credentials.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from storage.errors import IntegrityError, ObjectMissing, StoreUnavailable
from storage.stores.multipart_upload import put, upload_stream
from storage.stores.object_store import MOST_READ_BYTES, UnfinishedWrite, WrittenObject, checked_key, is_key
from storage.stores.retry_policy import RetryPolicy
from storage.stores.s3_bucket import Fetched, S3Bucket
from storage.stores.s3_error import ConditionFailed, error_code

_READ_BYTES = 8 * 1024 * 1024
_READS_AHEAD = 2
_DEFAULT_RETRY_POLICY = RetryPolicy()


class S3Store:
    """An `ObjectStore` below one prefix of a bucket."""

    def __init__(
        self, bucket: S3Bucket, prefix: str = "", *, retry_policy: RetryPolicy = _DEFAULT_RETRY_POLICY
    ) -> None:
        """Use the objects below `prefix`; `retry_policy` is for the pieces of large objects, all this class repeats."""
        self._bucket = bucket
        self._below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._retry_policy = retry_policy

    @property
    def url(self) -> str:
        """Bucket and prefix as a URL."""
        return f"s3://{self._bucket.name}/{self._below}".rstrip("/")

    def read(self, key: str, *, at_most_bytes: int = MOST_READ_BYTES) -> bytes:
        """Return the object's bytes in one GET; raise `ObjectMissing` where there is none, `IntegrityError` where it is
        larger, before more of it is received.
        """
        return self._bucket.fetch(self._name(key), at_most_bytes=at_most_bytes).data

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes in ranged GETs, a few ahead, each asked again where it breaks.

        All ranges are of one and the same object: `IntegrityError` where it was replaced meanwhile.
        """
        name = self._name(key)
        try:
            first = self._retry_policy.call(lambda: self._fetch_range(name, 0))
        except StoreUnavailable as error:
            if error_code(error.__cause__ or error) not in {"InvalidRange", "416"}:
                raise
            return  # no range of an empty object can be satisfied
        yield first.data
        starts = range(len(first.data), first.total_bytes, _READ_BYTES)
        if starts:
            yield from self._read_ahead(name, starts, first)

    def create(self, key: str, data: bytes) -> bool:
        """Create the object only if absent, in one PUT: True when this call made it, False when one was there."""
        try:
            self._bucket.ask("create", "put_object", Key=self._name(key), Body=data, IfNoneMatch="*")
        except ConditionFailed:
            return False
        return True

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite in one PUT."""
        put(self._bucket, self._name(key), data)

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
        """Upload chunks as one object, in parts above 16 MiB, hashing on the way."""
        return upload_stream(self._bucket, self._name(key), chunks, retry_policy=self._retry_policy)

    def keys(self, prefix: str) -> list[str]:
        """Return all keys under the folder `prefix`, sorted; one request per thousand."""
        return sorted(key for page in self._pages(prefix) for key in self._objects(page))

    def folders(self, prefix: str) -> list[str]:
        """Return the keys of the folders directly under the folder `prefix`, sorted."""
        pages = self._pages(prefix, Delimiter="/")
        found = [folder["Prefix"] for page in pages for folder in page.get("CommonPrefixes", ())]
        return sorted(filter(is_key, (self._key(name.rstrip("/")) for name in found)))

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly under the folder `prefix`, in one request unless folders come before it."""
        for page in self._pages(prefix, Delimiter="/", first_page=1):
            for key in self._objects(page):
                return key
        return None

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None where there is no object."""
        try:
            return int(self._bucket.ask("stat", "head_object", Key=self._name(key))["ContentLength"])
        except ObjectMissing:
            return None

    def delete(self, key: str) -> None:
        """Delete the object if it is there, in one request."""
        try:
            self._bucket.ask("delete", "delete_object", Key=self._name(key))
        except ObjectMissing:
            return

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        """Return the multipart uploads under the folder `prefix`: bytes of their parts, age by the store's clock."""
        folder, found = self._name(prefix) + "/", []
        for page in self._upload_pages(folder):
            now = _answered_at(page)
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(folder) and is_key(self._key(upload["Key"])):
                    found.append(self._unfinished(upload, now))
        return sorted(found, key=lambda write: (write.key, write.token))

    def discard(self, write: UnfinishedWrite) -> None:
        """Abort a multipart upload; one that is gone or complete is no error."""
        try:
            self._bucket.ask("discard", "abort_multipart_upload", Key=self._name(write.key), UploadId=write.token)
        except ObjectMissing:
            return

    def local_path(self, key: str) -> Path | None:
        """Return None: the bytes are elsewhere."""
        checked_key(key)
        return None

    def _name(self, key: str) -> str:
        return self._below + checked_key(key)

    def _key(self, name: str) -> str:
        return name[len(self._below) :]

    def _fetch_range(self, name: str, start: int, etag: str | None = None) -> Fetched:
        same: dict[str, Any] = {} if etag is None else {"IfMatch": etag}
        try:
            return self._bucket.fetch(name, Range=f"bytes={start}-{start + _READ_BYTES - 1}", **same)
        except ConditionFailed as changed:
            raise IntegrityError(f"s3://{self._bucket.name}/{name}: was replaced while it was read") from changed

    def _read_ahead(self, name: str, starts: range, first: Fetched) -> Iterator[bytes]:
        def fetch(start: int) -> bytes:
            data = self._retry_policy.call(lambda: self._fetch_range(name, start, first.etag)).data
            expected = min(_READ_BYTES, first.total_bytes - start)
            if len(data) != expected:
                raise IntegrityError(f"s3://{self._bucket.name}/{name}: {len(data)} bytes at {start}, not {expected}")
            return data

        ahead: deque[Future[bytes]] = deque()
        pool = ThreadPoolExecutor(_READS_AHEAD, thread_name_prefix="cairn-read")
        try:
            for start in starts:
                ahead.append(pool.submit(fetch, start))
                if len(ahead) > _READS_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _pages(self, prefix: str, *, first_page: int = 1000, **parameters: Any) -> Iterator[Mapping[str, Any]]:
        parameters |= {"Prefix": self._name(prefix) + "/", "MaxKeys": first_page}
        while True:
            page = self._bucket.ask("list", "list_objects_v2", **parameters)
            yield page
            if not page.get("IsTruncated") or not page.get("NextContinuationToken"):
                return
            parameters |= {"ContinuationToken": page["NextContinuationToken"], "MaxKeys": 1000}

    def _objects(self, page: Mapping[str, Any]) -> Iterator[str]:
        # A name that ends in "/" is some console's idea of a folder: no key, like whatever else is not ours.
        return filter(is_key, (self._key(item["Key"]) for item in page.get("Contents", ())))

    def _upload_pages(self, folder: str) -> Iterator[Mapping[str, Any]]:
        markers: dict[str, Any] = {}
        while True:
            page = self._bucket.ask("list", "list_multipart_uploads", Prefix=folder, **markers)
            yield page
            following = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
            if not page.get("IsTruncated") or following == markers:
                return
            markers = {name: value for name, value in following.items() if value}

    def _unfinished(self, upload: Mapping[str, Any], now: datetime) -> UnfinishedWrite:
        return UnfinishedWrite(
            key=self._key(upload["Key"]),
            bytes=self._part_bytes(upload["Key"], upload["UploadId"]),
            age_seconds=max(0.0, (now - upload["Initiated"]).total_seconds()),
            token=upload["UploadId"],
        )

    def _part_bytes(self, name: str, upload_id: str) -> int:
        total: int = 0
        marker: int = 0
        while True:
            try:
                page = self._bucket.ask("list", "list_parts", Key=name, UploadId=upload_id, PartNumberMarker=marker)
            except ObjectMissing:
                return total
            total += sum(part["Size"] for part in page.get("Parts", ()))
            following = int(page.get("NextPartNumberMarker") or 0)
            if not page.get("IsTruncated") or following <= marker:
                return total
            marker = following


def _answered_at(answer: Mapping[str, Any]) -> datetime:
    """Return the server's time of the answer; this machine's where the server did not say."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)
