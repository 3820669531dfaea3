"""Sends the parts of uploads from threads, over blocking connections: an event loop takes far more processor time.

The bucket's own client prepares and signs each request and reads its answer; only the bytes go another way. Parts are
not hashed for their signature: whoever reads a checkpoint checks every byte. Small objects stay signed whole, and with
the client: nothing could ever take the place of a spoiled entry of a log.
"""

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_CONNECTIONS = 32
_PIECE_BYTES = 1 << 20
_UNIQUE = "cairn-parts"


class PartSender:
    """The connections of one bucket's uploads."""

    def __init__(self, *, piece_seconds: float, answer_seconds: float) -> None:
        """Give up a piece of a part that does not leave in time, or a part that is not answered so long after it."""
        self._limits = piece_seconds, answer_seconds
        self._threads = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="cairn-upload")
        self._http: Any = None

    def attach(self, client: Any, ca_bundle: str | None) -> None:
        """Send the parts that this client of botocore's uploads; attaching it again changes nothing."""
        self._ca_bundle = ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE") or True  # as botocore chooses
        client.meta.events.register("before-sign.s3.UploadPart", _leave_unsigned, unique_id=f"{_UNIQUE}-sign")
        client.meta.events.register("before-send.s3.UploadPart", self._send, unique_id=f"{_UNIQUE}-send")

    async def _send(self, request: Any, **_: object) -> Any:
        """Return the server's answer as the client's own connection would."""
        from aiobotocore.awsrequest import AioAWSResponse
        from botocore.awsrequest import AWSPreparedRequest

        is_given_up = threading.Event()
        pieces = _pieces(request.body, is_given_up)
        prepared = AWSPreparedRequest(request.method, request.url, request.headers, pieces, False)
        sending = self._threads.submit(self._connections(request.url).send, prepared)
        try:
            found = await asyncio.wrap_future(sending)
        finally:
            is_given_up.set()
        answer = AioAWSResponse(found.url, found.status_code, found.headers, found.raw)
        answer._content = found.content  # it has been read
        return answer

    def _connections(self, url: str) -> Any:
        from botocore.httpsession import URLLib3Session
        from botocore.utils import get_environ_proxies

        if self._http is None:
            self._http = URLLib3Session(
                verify=self._ca_bundle,
                proxies=get_environ_proxies(url),
                timeout=self._limits,
                max_pool_connections=_CONNECTIONS,
            )
        return self._http


def _pieces(body: Any, is_given_up: threading.Event) -> Iterator[memoryview]:
    """Yield a part without a copy; an error in between closes the connection, so that the server keeps nothing."""
    view = memoryview(body) if isinstance(body, bytes | bytearray) else body.getbuffer()
    for start in range(0, view.nbytes, _PIECE_BYTES):
        if is_given_up.is_set():
            raise ConnectionAbortedError("the upload was given up")
        yield view[start : start + _PIECE_BYTES]


def _leave_unsigned(request: Any, **_: object) -> None:
    # A setting of `payload_signing_enabled` in the AWS configuration file has the last word.
    from botocore.config import Config

    config = request.context["client_config"]
    options = config.s3 or {}
    if options.get("payload_signing_enabled") is None:
        request.context["client_config"] = config.merge(Config(s3={**options, "payload_signing_enabled": False}))
