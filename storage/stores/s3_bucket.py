"""One S3 bucket through s3fs: one request per call, with a time limit; its errors as those of `storage`.

Credentials, region and endpoint come from the standard AWS chain. s3fs runs all requests of a process as coroutines on
one event-loop thread; here each is a future. Its listing caches and shared instances are off, because both are stale.
"""

import asyncio
import os
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from cairn.storage.errors import ObjectMissing, StorageError, StoreFull, StoreRefused, StoreUnavailable
from cairn.storage.stores import object_store, redaction
from cairn.storage.stores.ranged_store import Fetched

T = TypeVar("T")
_BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
_CONNECTIONS = 32
ANSWER_SECONDS, SILENCE_SECONDS = 10.0, 60.0
"""Time limits of a request: for a small answer, or a piece of a part; and without data during a long one."""
_INVALID_ENDPOINT = ("Invalid endpoint: ", "Invalid IPv6 URL")
"""How the plain ValueErrors begin that botocore and urllib raise for an endpoint; any other one is a bug."""


class ConditionFailed(StorageError):
    """The condition of a request was not met: with If-None-Match, the object exists."""


def convert_error(error: Exception, *, action: str, where: str) -> StorageError:
    """Return the storage error for an exception that the client raised during `action`."""
    code = error_code(error)
    if code in {"PreconditionFailed", "412"}:
        return ConditionFailed(f"{where}: cannot {action}: {code}")
    if code in {"NoSuchKey", "404", "NoSuchUpload", "NoSuchVersion"}:
        return ObjectMissing(f"{where}: no such object")
    silence = "no answer in time" if isinstance(error, TimeoutError) else "no message"
    message = " ".join(str(error).split()) or silence
    problem = redaction.redact(f"{where}: cannot {action}: {code}: {message}")
    if code in object_store.advice()["s3_full"]["codes"].split():
        return StoreFull(f"{problem} (the store or its quota is full; free space and run the same command again)")
    if (bundle := next(filter(os.environ.get, _BUNDLES), "")) and code in ("HTTPClientError", "SSLError"):
        cause = getattr(error, "kwargs", {}).get("error")
        if code == "SSLError" or isinstance(cause, FileNotFoundError | PermissionError | ssl.SSLError):
            rule = "must be a readable PEM file of certificates, one of which vouches for the server's"
            return StoreRefused(f"{problem}; {bundle} = {os.environ[bundle]!r}: {rule}")
    for advice, codes in object_store.advice()["s3_refused"].items():
        if code in codes.split():
            return StoreRefused(f"{problem}; {advice}")
    return StoreUnavailable(problem)


def error_code(error: BaseException) -> str:
    """Return the server's error code, or the exception's class name if no server answered."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code"):
            return str(response["Error"]["Code"])
    if isinstance(error, ValueError) and str(error).startswith(_INVALID_ENDPOINT):
        return "InvalidEndpoint"
    return type(error).__name__


class PartSender:
    """Sends the parts of uploads from threads, over blocking connections: an event loop takes far more processor time.

    Parts are not hashed for their signature: every reader of a checkpoint checks each byte. Small objects stay signed
    whole, and with the client: nothing could ever take the place of a spoiled entry of a log.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="cairn-upload")
        self._http: Any = None

    def attach(self, client: Any, ca_bundle: str | None) -> None:
        """Send the parts that this client of botocore's uploads; attaching it again changes nothing."""
        self._ca_bundle = ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE") or True  # as botocore chooses
        client.meta.events.register("before-sign.s3.UploadPart", _leave_unsigned, unique_id="cairn-parts-sign")
        client.meta.events.register("before-send.s3.UploadPart", self._send, unique_id="cairn-parts-send")

    async def _send(self, request: Any, **_: object) -> Any:
        """Return the server's answer as the client's own connection would."""
        from aiobotocore.awsrequest import AioAWSResponse
        from botocore.awsrequest import AWSPreparedRequest
        from botocore.httpsession import URLLib3Session
        from botocore.utils import get_environ_proxies

        if self._http is None:
            proxies, limits = get_environ_proxies(request.url), (ANSWER_SECONDS, SILENCE_SECONDS)
            self._http = URLLib3Session(self._ca_bundle, proxies, limits, max_pool_connections=_CONNECTIONS)
        is_given_up = threading.Event()
        pieces = _pieces(request.body, is_given_up)
        prepared = AWSPreparedRequest(request.method, request.url, request.headers, pieces, False)
        sending = self._threads.submit(self._http.send, prepared)
        try:
            found = await asyncio.wrap_future(sending)
        finally:
            is_given_up.set()
        answer = AioAWSResponse(found.url, found.status_code, found.headers, found.raw)
        answer._content = found.content  # it has been read
        return answer


def _pieces(body: Any, is_given_up: threading.Event) -> Iterator[memoryview]:
    """Yield a part without a copy; an error in between closes the connection, so that the server keeps nothing."""
    view = memoryview(body) if isinstance(body, bytes | bytearray) else body.getbuffer()
    for start in range(0, view.nbytes, 1 << 20):
        if is_given_up.is_set():
            raise ConnectionAbortedError("the upload was given up")
        yield view[start : start + (1 << 20)]


def _leave_unsigned(request: Any, **_: object) -> None:
    # A setting of `payload_signing_enabled` in the AWS configuration file has the last word.
    from botocore.config import Config

    config = request.context["client_config"]
    options = config.s3 or {}
    if options.get("payload_signing_enabled") is None:
        request.context["client_config"] = config.merge(Config(s3={**options, "payload_signing_enabled": False}))


def upload_seconds(size_bytes: int) -> float:
    """Return the limit for an upload at 100 kB/s, the slowest connection worth using."""
    return ANSWER_SECONDS + size_bytes / 100_000


def wait_for(future: "Future[T]") -> T:
    """Return the answer to a request; an interrupted wait closes its connection."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class S3Bucket:
    """A bucket and its client."""

    def __init__(self, name: str) -> None:
        """Prepare the client; the first request looks for credentials and connects."""
        import s3fs

        self.name, self._parts = name, PartSender()
        checksums = ("request_checksum_calculation", "response_checksum_validation")
        limits = {"connect_timeout": 3.0, "read_timeout": SILENCE_SECONDS, "max_pool_connections": _CONNECTIONS}
        config: dict[str, Any] = {"retries": {"total_max_attempts": 1, "mode": "standard"}, **limits}
        config |= dict.fromkeys(checksums, "when_required")
        # botocore reads AWS_DEFAULT_REGION only; every other AWS SDK reads AWS_REGION first.
        region = {"region_name": os.environ["AWS_REGION"]} if os.environ.get("AWS_REGION") else {}
        self._client = s3fs.S3FileSystem(
            skip_instance_cache=True, use_listings_cache=False, client_kwargs=region, config_kwargs=config
        )
        # Only RetryPolicy retries, neither s3fs nor botocore: retries of several layers multiply.
        self._client.retries = 1

    def request(self, action: str, method: str, *, seconds: float | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the answer to one S3 call within `seconds` or `ANSWER_SECONDS`; `action` names it in errors."""
        return wait_for(self.start_request(action, method, seconds=seconds, **parameters))

    def start_request(
        self, action: str, method: str, *, seconds: float | None = None, **parameters: Any
    ) -> "Future[dict[str, Any]]":
        """Send one S3 call and return at once; cancelling the future closes the connection."""
        body = self._call(action, method, ANSWER_SECONDS if seconds is None else seconds, parameters)
        return asyncio.run_coroutine_threadsafe(body, self._loop())

    def fetch(self, key: str, *, at_most_bytes: int = object_store.MAX_READ_BYTES, **parameters: Any) -> Fetched:
        """Return the body of one GET; raises IntegrityError once it exceeds `at_most_bytes`."""
        body = self._fetch({"Key": key, **parameters}, at_most_bytes)
        return wait_for(asyncio.run_coroutine_threadsafe(body, self._loop()))

    async def _call(self, action: str, method: str, seconds: float, parameters: dict[str, Any]) -> dict[str, Any]:
        with self._convert_errors(action, parameters):
            async with asyncio.timeout(seconds):
                if method == "upload_part":
                    client = await self._client.set_session()
                    self._parts.attach(client, self._client.session.get_config_variable("ca_bundle"))
                answer: dict[str, Any] = await self._client._call_s3(method, Bucket=self.name, **parameters)
                return answer

    async def _fetch(self, parameters: dict[str, Any], at_most_bytes: int) -> Fetched:
        with self._convert_errors("read", parameters):
            answer, data = await self._call("read", "get_object", ANSWER_SECONDS, parameters), bytearray()
            async with answer["Body"] as body:
                while piece := await asyncio.wait_for(body.read(1 << 20), ANSWER_SECONDS):
                    data += piece
                    if len(data) > at_most_bytes:
                        raise object_store.too_large(f"s3://{self.name}/{parameters['Key']}", at_most_bytes)
            total = str(answer.get("ContentRange", "")).rpartition("/")[2]
            return Fetched(data=bytes(data), etag=str(answer.get("ETag", "")), total_bytes=int(total or len(data)))

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
