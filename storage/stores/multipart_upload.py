"""Uploads a stream of unknown length as one S3 object, in bounded memory; up to one part is a single PUT.

Source: Amazon S3 user guide, "Uploading and copying objects using multipart upload". No conditional headers: stores
disagree about them here.
"""

import hashlib
import io
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from storage.stores.object_store import PART_BYTES, WrittenObject
from storage.stores.retry_policy import RetryPolicy
from storage.stores.s3_bucket import S3Bucket

CONCURRENT_PARTS = 3
_MAX_PARTS = 10_000
_LARGE_BODY_BYTES = 1 << 20
_TOKEN = "cairn-write"


class PartStream:
    """Regroups chunks into parts, and counts and hashes their bytes."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = chunks
        self._digest = hashlib.sha256()
        self._size_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        """Yield parts of PART_BYTES, the last one shorter; a chunk is copied and may change afterwards."""
        part = io.BytesIO()
        for chunk in self._chunks:
            view = memoryview(chunk)
            if not view.nbytes:
                continue
            view = view.cast("B")
            self._digest.update(view)
            self._size_bytes += view.nbytes
            while view.nbytes:
                taken = part.write(view[: PART_BYTES - part.tell()])
                view = view[taken:]
                if part.tell() == PART_BYTES:
                    yield part.getvalue()
                    part = io.BytesIO()
        if part.tell():
            yield part.getvalue()

    def written(self) -> WrittenObject:
        """Return size and digest of the chunks so far."""
        return WrittenObject(bytes=self._size_bytes, sha256=self._digest.hexdigest())


def upload_stream(
    bucket: S3Bucket, key: str, chunks: Iterable[bytes | memoryview], *, retry_policy: RetryPolicy
) -> WrittenObject:
    """Upload the chunks as the object `key`; an error of any kind leaves nothing behind."""
    stream = PartStream(chunks)
    parts = iter(stream)
    first_parts = [part for part in (next(parts, b""), next(parts, None)) if part is not None]
    if len(first_parts) == 2:
        _Upload.start(bucket, key, retry_policy).send(chain(_pop_each(first_parts), parts), stream)
    else:
        retry_policy.call(lambda: put(bucket, key, first_parts[0]))
    return stream.written()


def put(bucket: S3Bucket, key: str, data: bytes, **parameters: Any) -> None:
    """Create or overwrite the object in one PUT."""
    seconds = bucket.timeouts.upload_seconds(len(data))
    bucket.request("write", "put_object", seconds=seconds, Key=key, Body=sendable(data), **parameters)


def sendable(data: bytes) -> bytes | io.BytesIO:
    """Return a large body as a file, which the client sends in pieces without a copy."""
    return io.BytesIO(data) if len(data) >= _LARGE_BODY_BYTES else data


def _pop_each(parts: list[bytes]) -> Iterator[bytes]:
    while parts:
        yield parts.pop(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SentPart:
    number: int
    data: bytes
    answer: "Future[Any]"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Upload:
    bucket: S3Bucket
    key: str
    upload_id: str
    token: str
    retry_policy: RetryPolicy

    @staticmethod
    def start(bucket: S3Bucket, key: str, retry_policy: RetryPolicy) -> "_Upload":
        token = uuid.uuid4().hex
        answer = retry_policy.call(
            lambda: bucket.request("upload", "create_multipart_upload", Key=key, Metadata={_TOKEN: token})
        )
        return _Upload(bucket=bucket, key=key, upload_id=answer["UploadId"], token=token, retry_policy=retry_policy)

    def send(self, parts: Iterator[bytes], stream: PartStream) -> None:
        sent: deque[_SentPart] = deque()
        try:
            etags = self._send_parts(parts, sent)
            self._complete(etags, stream.written().bytes)
        except BaseException:
            # Cancelled before the abort: the server would keep, and bill, a part that arrives after it.
            for part in sent:
                part.answer.cancel()
            with suppress(StorageError):
                self.retry_policy.call(self._abort)
            raise

    def _send_parts(self, parts: Iterator[bytes], sent: deque[_SentPart]) -> list[str]:
        etags: list[str] = []
        for number, data in enumerate(parts, 1):
            if number > _MAX_PARTS:
                raise StorageError(f"{self.key}: more than {_MAX_PARTS * PART_BYTES} bytes; write smaller shards")
            if len(sent) == CONCURRENT_PARTS:
                etags.append(self._settle_oldest(sent))
            sent.append(_SentPart(number=number, data=data, answer=self._start_part(number, data)))
        while sent:
            etags.append(self._settle_oldest(sent))
        return etags

    def _start_part(self, number: int, data: bytes) -> "Future[Any]":
        seconds = self.bucket.timeouts.upload_seconds(len(data) * CONCURRENT_PARTS)
        parameters = {"Key": self.key, "UploadId": self.upload_id, "PartNumber": number, "Body": sendable(data)}
        return self.bucket.start_request("upload", "upload_part", seconds=seconds, **parameters)

    def _settle_oldest(self, sent: deque[_SentPart]) -> str:
        """Wait for the oldest part, with retries; return its ETag."""
        part = sent[0]
        first_answer = [part.answer]

        def send() -> Any:
            answer = first_answer.pop() if first_answer else self._start_part(part.number, part.data)
            try:
                return answer.result()
            except BaseException:
                answer.cancel()
                raise

        etag = str(self.retry_policy.call(send)["ETag"])
        sent.popleft()
        return etag

    def _complete(self, etags: list[str], size_bytes: int) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        try:
            self.retry_policy.call(
                lambda: self.bucket.request(
                    "upload",
                    "complete_multipart_upload",
                    seconds=self.bucket.timeouts.silence_seconds,
                    Key=self.key,
                    UploadId=self.upload_id,
                    MultipartUpload={"Parts": parts},
                )
            )
        except StoreRefused:
            raise
        except (ObjectMissing, StoreUnavailable) as unknown:
            # The upload is gone or the answer was lost: it succeeded if the object is this one.
            if not self._exists(size_bytes):
                raise StoreUnavailable(f"s3://{self.bucket.name}/{self.key}: cannot upload: {unknown}") from unknown

    def _exists(self, size_bytes: int) -> bool:
        try:
            found = self.retry_policy.call(lambda: self.bucket.request("stat", "head_object", Key=self.key))
        except ObjectMissing:
            return False
        return bool(found["ContentLength"] == size_bytes and found.get("Metadata", {}).get(_TOKEN) == self.token)

    def _abort(self) -> None:
        with suppress(ObjectMissing):
            self.bucket.request("abort", "abort_multipart_upload", Key=self.key, UploadId=self.upload_id)
