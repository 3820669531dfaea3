"""Uploads a stream of unknown length as one S3 object, in bounded memory; up to one part is a single PUT.

Source: Amazon S3 user guide, "Uploading and copying objects using multipart upload". Stores disagree about conditional
headers here: none is sent.
"""

import io
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from cairn.storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from cairn.storage.stores.object_store import PART_BYTES
from cairn.storage.stores.retrying_store import RetryPolicy
from cairn.storage.stores.s3_bucket import S3Bucket

CONCURRENT_PARTS = 3
_MAX_PARTS = 10_000
_TOKEN = "cairn-write"
_SPARE = deque[bytearray](maxlen=2 * (CONCURRENT_PARTS + 1))
"""Parts that were sent: memory that is used again costs no page faults, which take longer than copying does."""


def upload_stream(bucket: S3Bucket, key: str, chunks: Iterable[bytes | memoryview], *, policy: RetryPolicy) -> int:
    """Upload the chunks as the object `key` and return its bytes; an error of any kind leaves nothing behind."""
    parts = _regroup(chunks)
    first_parts = [part for part in (next(parts, b""), next(parts, None)) if part is not None]
    if len(first_parts) == 2:
        # pop() keeps no reference to a part that is sent.
        return _Upload(bucket, key, policy).send(chain(map(first_parts.pop, (0, 0)), parts))
    policy.call(put, bucket, key, bytes(first_parts[0]))
    return len(first_parts[0])


def put(bucket: S3Bucket, key: str, data: bytes) -> None:
    """Create or overwrite the object in one PUT."""
    seconds = bucket.timeouts.upload_seconds(len(data))
    body = io.BytesIO(data) if len(data) >= 1 << 20 else data  # the client sends a file in pieces, without a copy
    bucket.request("write", "put_object", seconds=seconds, Key=key, Body=body)


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
    def __init__(self, bucket: S3Bucket, key: str, retry_policy: RetryPolicy) -> None:
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
        seconds = self._bucket.timeouts.upload_seconds(len(data) * CONCURRENT_PARTS)
        parameters = {"Key": self._key, "UploadId": self._id, "PartNumber": number, "Body": data}
        return self._bucket.start_request("upload", "upload_part", seconds=seconds, **parameters)

    def _settle_oldest(self) -> str:
        """Wait for the oldest part, with retries; return its ETag."""
        number, data, sent = self._sent[0]
        first_answer, failed = [sent], list[StorageError]()

        def send() -> Any:
            answer = first_answer.pop() if first_answer else self._start_part(number, data)
            try:
                return answer.result()
            except BaseException:
                answer.cancel()
                raise

        policy = replace(self._retry_policy, on_retry=lambda error, seconds: failed.append(error))
        etag = str(policy.call(send)["ETag"])
        self._sent.popleft()
        if isinstance(data, bytearray) and not failed:  # a try that was given up may still be reading it
            _SPARE.append(data)
        return etag

    def _complete(self, etags: list[str]) -> None:
        parts = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]}
        upload = {"UploadId": self._id, "MultipartUpload": parts, "seconds": self._bucket.timeouts.silence_seconds}
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
