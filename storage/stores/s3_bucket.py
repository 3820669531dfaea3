"""One S3 bucket through s3fs: one request per call, bounded in time, errors in words.

Owns the client's options and time limits. Credentials, region and endpoint come from the standard AWS chain
(environment, profile, instance role) and are never kept, shown or taken from a URL. s3fs serves all requests of a
process from one event-loop thread; a request is a coroutine there and a future here, so several can be under way
without threads of our own. Its listing caches and shared instances serve stale names and stay off.
"""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from storage.errors import StorageError
from storage.stores.object_store import MOST_READ_BYTES, larger_than
from storage.stores.s3_error import explained_error

_PIECE_BYTES = 1 << 20
_SLOWEST_BYTES_PER_SECOND = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """What one request may take: to connect, to answer something small, and in silence during something long."""

    connect_seconds: float = 3.0
    answer_seconds: float = 10.0
    silence_seconds: float = 60.0

    def upload_seconds(self, size_bytes: int) -> float:
        """Return what sending so many bytes may take on the slowest line that is worth using."""
        return self.answer_seconds + size_bytes / _SLOWEST_BYTES_PER_SECOND


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The body of an answer to a GET and the headers that say which object it is a piece of."""

    data: bytes
    etag: str
    total_bytes: int


_DEFAULT = Timeouts()


class S3Bucket:
    """A bucket and the client that asks for its objects."""

    def __init__(self, name: str, *, timeouts: Timeouts = _DEFAULT) -> None:
        """Prepare the client; nothing is asked and no credential is looked for before the first request."""
        import s3fs

        self._name = name
        self._timeouts = timeouts
        self._client = s3fs.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            client_kwargs=_region(),
            config_kwargs=_options(timeouts),
        )
        # Only RetryPolicy retries, neither s3fs nor botocore: retries of several layers multiply.
        self._client.retries = 1

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self._name

    @property
    def timeouts(self) -> Timeouts:
        """What its requests may take."""
        return self._timeouts

    def ask(self, doing: str, method: str, *, seconds: float | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the answer to one S3 call; `doing` is for the error: `ObjectMissing`, `StoreRefused`, ….

        `seconds` bounds the whole call; without it `answer_seconds` does.
        """
        answer: dict[str, Any] = self._result(self.begin(doing, method, seconds=seconds, **parameters))
        return answer

    def begin(self, doing: str, method: str, *, seconds: float | None = None, **parameters: Any) -> "Future[Any]":
        """Send one S3 call and return at once; cancelling the future breaks the connection."""
        limit = self._timeouts.answer_seconds if seconds is None else seconds
        return asyncio.run_coroutine_threadsafe(self._call(doing, method, limit, parameters), self._loop())

    def fetch(self, key: str, *, at_most_bytes: int = MOST_READ_BYTES, **parameters: Any) -> Fetched:
        """Return the whole body of one GET, verified to be as long as the server said.

        Raises `IntegrityError` where it is longer than `at_most_bytes`, and receives no more of it.
        """
        asked = self._fetch({"Key": key, **parameters}, at_most_bytes)
        fetched: Fetched = self._result(asyncio.run_coroutine_threadsafe(asked, self._loop()))
        return fetched

    async def _call(self, doing: str, method: str, seconds: float, parameters: dict[str, Any]) -> Any:
        with self._explained(doing, parameters):
            async with asyncio.timeout(seconds):
                return await self._client._call_s3(method, Bucket=self._name, **parameters)

    async def _fetch(self, parameters: dict[str, Any], at_most_bytes: int) -> Fetched:
        with self._explained("read", parameters):
            async with asyncio.timeout(self._timeouts.answer_seconds):
                answer = await self._client._call_s3("get_object", Bucket=self._name, **parameters)
            pieces, received_bytes = list[bytes](), 0
            async with answer["Body"] as body:
                while True:
                    async with asyncio.timeout(self._timeouts.answer_seconds):
                        piece = await body.read(_PIECE_BYTES)
                    if not piece:
                        break
                    received_bytes += len(piece)
                    if received_bytes > at_most_bytes:
                        raise larger_than(f"s3://{self._name}/{parameters['Key']}", at_most_bytes)
                    pieces.append(piece)
            data = b"".join(pieces)
            total = str(answer.get("ContentRange", "")).rpartition("/")[2]
            return Fetched(data=data, etag=str(answer.get("ETag", "")), total_bytes=int(total or len(data)))

    def _loop(self) -> asyncio.AbstractEventLoop:
        try:
            loop: asyncio.AbstractEventLoop = self._client.loop
        except RuntimeError as forked:
            raise StorageError(f"s3://{self._name}: opened before a fork; open the store in each process") from forked
        return loop

    @contextmanager
    def _explained(self, doing: str, parameters: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            what = parameters.get("Key") or parameters.get("Prefix") or ""
            raise explained_error(error, doing=doing, where=f"s3://{self._name}/{what}") from error

    def _result(self, future: "Future[Any]") -> Any:
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _options(timeouts: Timeouts) -> dict[str, Any]:
    return {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": timeouts.connect_seconds,
        "read_timeout": timeouts.silence_seconds,
        "max_pool_connections": 32,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }


def _region() -> dict[str, str]:
    # botocore reads AWS_DEFAULT_REGION only; every other AWS SDK reads AWS_REGION first.
    region = os.environ.get("AWS_REGION", "")
    return {"region_name": region} if region else {}
