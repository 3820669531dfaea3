"""One S3 bucket through s3fs: one request per call, with a time limit.

Credentials, region and endpoint come from the standard AWS chain. s3fs runs all requests of a process as coroutines on
one event-loop thread; here each is a future. Its listing caches and shared instances are off, because both are stale.
"""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from storage.errors import StorageError
from storage.stores.object_store import MAX_READ_BYTES, too_large
from storage.stores.part_sender import PartSender
from storage.stores.s3_error import convert_error


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Time limits of one request: to connect, for a small answer, and without data during a long one."""

    connect_seconds: float = 3.0
    answer_seconds: float = 10.0
    silence_seconds: float = 60.0

    def upload_seconds(self, size_bytes: int) -> float:
        """Return the limit for an upload at 100 kB/s, the slowest connection worth using."""
        return self.answer_seconds + size_bytes / 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The body of a GET, with the ETag and size of the whole object."""

    data: bytes
    etag: str
    total_bytes: int


_DEFAULT = Timeouts()


class S3Bucket:
    """A bucket and its client."""

    def __init__(self, name: str, *, timeouts: Timeouts = _DEFAULT) -> None:
        """Prepare the client; the first request looks for credentials and connects."""
        import s3fs

        self.name, self.timeouts = name, timeouts
        self._client = s3fs.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            # botocore reads AWS_DEFAULT_REGION only; every other AWS SDK reads AWS_REGION first.
            client_kwargs={"region_name": os.environ["AWS_REGION"]} if os.environ.get("AWS_REGION") else {},
            config_kwargs={
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                "connect_timeout": timeouts.connect_seconds,
                "read_timeout": timeouts.silence_seconds,
                "max_pool_connections": 32,
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )
        self._parts = PartSender(piece_seconds=timeouts.answer_seconds, answer_seconds=timeouts.silence_seconds)
        # Only RetryPolicy retries, neither s3fs nor botocore: retries of several layers multiply.
        self._client.retries = 1

    def request(self, action: str, method: str, *, seconds: float | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the answer to one S3 call within `seconds` or `answer_seconds`; `action` names it in errors."""
        answer: dict[str, Any] = self._result(self.start_request(action, method, seconds=seconds, **parameters))
        return answer

    def start_request(
        self, action: str, method: str, *, seconds: float | None = None, **parameters: Any
    ) -> "Future[Any]":
        """Send one S3 call and return at once; cancelling the future closes the connection."""
        limit = self.timeouts.answer_seconds if seconds is None else seconds
        return asyncio.run_coroutine_threadsafe(self._call(action, method, limit, parameters), self._loop())

    def fetch(self, key: str, *, at_most_bytes: int = MAX_READ_BYTES, **parameters: Any) -> Fetched:
        """Return the body of one GET; raises IntegrityError once it exceeds `at_most_bytes`."""
        body = self._fetch({"Key": key, **parameters}, at_most_bytes)
        fetched: Fetched = self._result(asyncio.run_coroutine_threadsafe(body, self._loop()))
        return fetched

    async def _call(self, action: str, method: str, seconds: float, parameters: dict[str, Any]) -> Any:
        with self._convert_errors(action, parameters):
            async with asyncio.timeout(seconds):
                if method == "upload_part":
                    client = await self._client.set_session()
                    self._parts.attach(client, self._client.session.get_config_variable("ca_bundle"))
                return await self._client._call_s3(method, Bucket=self.name, **parameters)

    async def _fetch(self, parameters: dict[str, Any], at_most_bytes: int) -> Fetched:
        with self._convert_errors("read", parameters):
            async with asyncio.timeout(self.timeouts.answer_seconds):
                answer = await self._client._call_s3("get_object", Bucket=self.name, **parameters)
            pieces, received_bytes = list[bytes](), 0
            async with answer["Body"] as body:
                while True:
                    async with asyncio.timeout(self.timeouts.answer_seconds):
                        piece = await body.read(1 << 20)
                    if not piece:
                        break
                    received_bytes += len(piece)
                    if received_bytes > at_most_bytes:
                        raise too_large(f"s3://{self.name}/{parameters['Key']}", at_most_bytes)
                    pieces.append(piece)
            data = b"".join(pieces)
            total = str(answer.get("ContentRange", "")).rpartition("/")[2]
            return Fetched(data=data, etag=str(answer.get("ETag", "")), total_bytes=int(total or len(data)))

    def _loop(self) -> asyncio.AbstractEventLoop:
        try:
            loop: asyncio.AbstractEventLoop = self._client.loop
        except RuntimeError as forked:
            raise StorageError(f"s3://{self.name}: opened before a fork; open the store in each process") from forked
        return loop

    @contextmanager
    def _convert_errors(self, action: str, parameters: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            what = parameters.get("Key") or parameters.get("Prefix") or ""
            raise convert_error(error, action=action, where=f"s3://{self.name}/{what}") from error

    def _result(self, future: "Future[Any]") -> Any:
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
