"""An S3 emulator in a process of its own; run as a script.

Prints one JSON line with the fields of an `S3Server` when it serves on a free port of loopback,
and ends when its standard input does, so it never outlives the process that started it. Parts may be small here.
"""

import asyncio
import io
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote

_SMALLEST_PART_BYTES = 64 * 1024
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True)
class Application:
    """moto's S3 behind HTTP: connections are kept, and one request at a time makes check and write one step."""

    answer: Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it ends."""
        try:
            while True:
                head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                if headers.get("expect", "").lower() == "100-continue":
                    writer.write(_CONTINUE)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                writer.write(self._respond(head, headers, body))
                await writer.drain()
                if headers.get("connection", "").lower() == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _respond(self, head: str, headers: dict[str, str], body: bytes) -> bytes:
        method, target, _ = head.split(" ")
        path, _, query = target.partition("?")
        environ = {
            "REQUEST_METHOD": method,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote(path, "latin-1"),
            "QUERY_STRING": query,
            "RAW_URI": target,
            "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": headers["host"].rpartition(":")[2],
            "SERVER_PROTOCOL": "HTTP/1.1",
            "CONTENT_TYPE": headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(body),
            "wsgi.errors": sys.stderr,
        } | {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
        said: list[Any] = []
        data = b"".join(self.answer(environ, lambda status, found, error=None: said.extend((status, found))))
        sent = [f"{name}: {value}" for name, value in said[1]] + [f"Date: {formatdate(usegmt=True)}"]
        if "content-length" not in {name.lower() for name, _ in said[1]}:
            sent.append(f"Content-Length: {len(data)}")
        answer = "\r\n".join([f"HTTP/1.1 {said[0]}", *sent]).encode("latin-1") + b"\r\n\r\n"
        return answer if method == "HEAD" else answer + data


async def main() -> None:
    """Serve until standard input ends."""
    os.environ["S3_UPLOAD_PART_MIN_SIZE"] = str(_SMALLEST_PART_BYTES)
    from moto.moto_server.werkzeug_app import create_backend_app

    keys = {"access_key": "test", "secret_key": "testsecret"}
    application = Application(create_backend_app("s3"))
    await serve_until_end(application, **keys, smallest_part_bytes=_SMALLEST_PART_BYTES)


async def serve_until_end(application: Application, **said: str | int) -> None:
    """Serve on a free port, say where and what else is to be known, and end when standard input does."""
    server = await asyncio.start_server(application.connected, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    print(json.dumps({"endpoint": endpoint, **said}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
