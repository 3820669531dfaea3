"""Google's XML API in front of the S3 emulator, in a process of its own; run as a script (see `tests.clouds.servers`).

The API is S3's in all that Cairn asks for, but for the condition of a create: x-goog-if-generation-match. An emulator
that speaks the JSON API (gcp-storage-emulator) is of no use here: the library asks by XML.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tests.s3.quick_server import Application, serve_until_end

_SMALLEST_PART_BYTES = 64 * 1024
_SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def translated(
    answer: Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]],
) -> Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]:
    """Return an application that takes the headers of Google's API."""

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if not environ.pop("HTTP_AUTHORIZATION", "").startswith("Bearer "):
            start("401 Unauthorized", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AuthenticationRequired</Code></Error>"]
        environ["HTTP_AUTHORIZATION"] = _SIGNED
        if (generation := environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)) is not None:
            assert generation == "0", generation
            environ["HTTP_IF_NONE_MATCH"] = "*"
        for name in [name for name in environ if name.startswith("HTTP_X_GOOG_META_")]:
            environ[name.replace("X_GOOG", "X_AMZ")] = environ.pop(name)

        def start_translated(status: str, headers: list[tuple[str, str]], error: object = None) -> None:
            start(status, [(name.replace("x-amz-", "x-goog-"), value) for name, value in headers])

        return answer(environ, start_translated)

    return application


async def main() -> None:
    """Serve until standard input ends."""
    os.environ["S3_UPLOAD_PART_MIN_SIZE"] = str(_SMALLEST_PART_BYTES)
    from moto.moto_server.werkzeug_app import create_backend_app

    await serve_until_end(Application(translated(create_backend_app("s3"))))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
