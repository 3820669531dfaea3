"""A stream of bytes of unknown length as one S3 object, in bounded memory.

Owns parts, how many are under way, their repetition, and the settlement of an unclear end (Amazon S3 user guide,
"Uploading and copying objects using multipart upload"). One part or less is a single PUT. Conditions are not used:
sound stores differ in what they make of them here.
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
from storage.stores.object_store import WrittenObject
from storage.stores.retry_policy import RetryPolicy
from storage.stores.s3_bucket import S3Bucket

PART_BYTES = 16 * 1024 * 1024
PARTS_UNDER_WAY = 3
_MOST_PARTS = 10_000
_LARGE_BODY_BYTES = 1 << 20
_TOKEN = "cairn-write"


class PartStream:
    """Chunks regrouped into parts; counted and hashed as they pass."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Read nothing yet."""
        self._chunks = chunks
        self._digest = hashlib.sha256()
        self._bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        """Yield parts of PART_BYTES each, the last one shorter; a chunk is copied once and may change afterwards."""
        part = io.BytesIO()
        for chunk in self._chunks:
            view = memoryview(chunk)
            if not view.nbytes:
                continue
            view = view.cast("B")
            self._digest.update(view)
            self._bytes += view.nbytes
            while view.nbytes:
                taken = part.write(view[: PART_BYTES - part.tell()])
                view = view[taken:]
                if part.tell() == PART_BYTES:
                    yield part.getvalue()
                    part = io.BytesIO()
        if part.tell():
            yield part.getvalue()

    def written(self) -> WrittenObject:
        """Return size and digest of what has passed."""
        return WrittenObject(bytes=self._bytes, sha256=self._digest.hexdigest())


def upload_stream(
    bucket: S3Bucket, key: str, chunks: Iterable[bytes | memoryview], *, retry_policy: RetryPolicy
) -> WrittenObject:
    """Upload the chunks as the object `key`; on any error, of whatever kind, nothing of them stays."""
    stream = PartStream(chunks)
    parts = iter(stream)
    beginning = [part for part in (next(parts, b""), next(parts, None)) if part is not None]
    if len(beginning) == 2:
        _Upload.begin(bucket, key, retry_policy).send(chain(_emptied(beginning), parts), stream)
    else:
        retry_policy.call(lambda: put(bucket, key, beginning[0]))
    return stream.written()


def put(bucket: S3Bucket, key: str, data: bytes, **parameters: Any) -> None:
    """Create or overwrite the object in one PUT."""
    seconds = bucket.timeouts.upload_seconds(len(data))
    bucket.ask("write", "put_object", seconds=seconds, Key=key, Body=sendable(data), **parameters)


def sendable(data: bytes) -> bytes | io.BytesIO:
    """Return the body as the client sends it best: a large one as a file, which shares the bytes, so piece by piece."""
    return io.BytesIO(data) if len(data) >= _LARGE_BODY_BYTES else data


def _emptied(parts: list[bytes]) -> Iterator[bytes]:
    while parts:
        yield parts.pop(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PartUnderWay:
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
    def begin(bucket: S3Bucket, key: str, retry_policy: RetryPolicy) -> "_Upload":
        token = uuid.uuid4().hex
        answer = retry_policy.call(
            lambda: bucket.ask("upload", "create_multipart_upload", Key=key, Metadata={_TOKEN: token})
        )
        return _Upload(bucket=bucket, key=key, upload_id=answer["UploadId"], token=token, retry_policy=retry_policy)

    def send(self, parts: Iterator[bytes], stream: PartStream) -> None:
        under_way: deque[_PartUnderWay] = deque()
        try:
            etags = self._send_parts(parts, under_way)
            self._complete(etags, stream.written().bytes)
        except BaseException:
            # Broken off first: a part that arrives after the abort would be kept, and charged, for ever.
            for part in under_way:
                part.answer.cancel()
            with suppress(StorageError):
                self.retry_policy.call(self._abort)
            raise

    def _send_parts(self, parts: Iterator[bytes], under_way: deque[_PartUnderWay]) -> list[str]:
        etags: list[str] = []
        for number, data in enumerate(parts, 1):
            if number > _MOST_PARTS:
                raise StorageError(f"{self.key}: more than {_MOST_PARTS * PART_BYTES} bytes; write smaller shards")
            if len(under_way) == PARTS_UNDER_WAY:
                etags.append(self._settle(under_way))
            under_way.append(_PartUnderWay(number=number, data=data, answer=self._begin_part(number, data)))
        while under_way:
            etags.append(self._settle(under_way))
        return etags

    def _begin_part(self, number: int, data: bytes) -> "Future[Any]":
        seconds = self.bucket.timeouts.upload_seconds(len(data) * PARTS_UNDER_WAY)
        parameters = {"Key": self.key, "UploadId": self.upload_id, "PartNumber": number, "Body": sendable(data)}
        return self.bucket.begin("upload", "upload_part", seconds=seconds, **parameters)

    def _settle(self, under_way: deque[_PartUnderWay]) -> str:
        """Wait for the oldest part, sending it again where that may help; return its ETag."""
        part = under_way[0]
        waiting = [part.answer]

        def ask() -> Any:
            answer = waiting.pop() if waiting else self._begin_part(part.number, part.data)
            try:
                return answer.result()
            except BaseException:
                answer.cancel()
                raise

        etag = str(self.retry_policy.call(ask)["ETag"])
        under_way.popleft()
        return etag

    def _complete(self, etags: list[str], size_bytes: int) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        try:
            self.retry_policy.call(
                lambda: self.bucket.ask(
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
        except (ObjectMissing, StoreUnavailable) as unclear:
            # The upload is gone or the answer was lost: it is done if the object there is this very one.
            if not self._is_there(size_bytes):
                raise StoreUnavailable(f"s3://{self.bucket.name}/{self.key}: cannot upload: {unclear}") from unclear

    def _is_there(self, size_bytes: int) -> bool:
        try:
            found = self.retry_policy.call(lambda: self.bucket.ask("stat", "head_object", Key=self.key))
        except ObjectMissing:
            return False
        return bool(found["ContentLength"] == size_bytes and found.get("Metadata", {}).get(_TOKEN) == self.token)

    def _abort(self) -> None:
        with suppress(ObjectMissing):
            self.bucket.ask("abort", "abort_multipart_upload", Key=self.key, UploadId=self.upload_id)
