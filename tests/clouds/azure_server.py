"""What Cairn asks of Azure Blob Storage, in a process of its own; run as a script (see `tests.clouds.servers`).

Sources: "Blob service REST API", Microsoft; held against Azurite by the slow part of the suite.
"""

import asyncio
import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.s3.quick_server import Application, serve_until_end

_PAGE = 1000
Answer = tuple[str, dict[str, str], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """The blobs of a container, and the blocks that are not committed, by name and id."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    blocks: dict[tuple[str, str], bytes] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)

    def answer(self, method: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        """Answer one request: about the container if there is no name."""
        if query.get("comp") == "list":
            return self._list(query)
        if query.get("comp") == "batch":
            return self._batch(body)
        if query.get("comp") == "block":
            self.blocks[name, query["blockid"]] = body
            return "201 Created", {}, b""
        if method == "PUT":
            if query.get("comp") == "blocklist":
                body = b"".join(self.blocks.pop((name, str(one.text))) for one in ElementTree.fromstring(body))
            return self._put(name, headers, body)
        if name not in self.blobs:
            return _refused("404 Not Found", "BlobNotFound")
        if method == "DELETE":
            del self.blobs[name]
            return "202 Accepted", {}, b""
        return self._get(name, headers)

    def _put(self, name: str, headers: dict[str, str], body: bytes) -> Answer:
        if headers.get("if-none-match") == "*" and name in self.blobs:
            return _refused("409 Conflict", "BlobAlreadyExists")
        self.blobs[name] = body
        self.metadata[name] = {key: value for key, value in headers.items() if key.startswith("x-ms-meta-")}
        return "201 Created", {"ETag": _tag(body), "Last-Modified": formatdate(usegmt=True)}, b""

    def _get(self, name: str, headers: dict[str, str]) -> Answer:
        data = self.blobs[name]
        found = {"ETag": _tag(data), "Last-Modified": formatdate(usegmt=True), "x-ms-blob-type": "BlockBlob"}
        found |= {key.replace("cairn-", "cairn_"): value for key, value in self.metadata[name].items()}
        if headers.get("if-match", found["ETag"]) != found["ETag"]:
            return _refused("412 Precondition Failed", "ConditionNotMet")
        asked = headers.get("x-ms-range") or headers.get("range")
        if not asked:
            return "200 OK", found | {"Content-Length": str(len(data))}, data
        first, _, last = asked.removeprefix("bytes=").partition("-")
        if int(first) >= len(data):
            return _refused("416 The range specified is invalid", "InvalidRange")
        part = data[int(first) : int(last) + 1]
        shown = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        return "206 Partial Content", found | {"Content-Range": shown, "Content-Length": str(len(part))}, part

    def _list(self, query: dict[str, str]) -> Answer:
        prefix, delimiter, marker = query.get("prefix", ""), query.get("delimiter", ""), query.get("marker", "")
        shown, most = dict[str, str](), int(query.get("maxresults", _PAGE))
        for name in sorted(one for one in self.blobs if one.startswith(prefix)):
            head, mark, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else (name, "", "")
            item = f"{prefix}{head}{mark}" if mark else name
            if item >= marker and item not in shown:
                shown[item] = f"<BlobPrefix><Name>{escape(item)}</Name></BlobPrefix>" if mark else self._entry(name)
        page = list(shown)[:most]
        left = list(shown)[most:]
        body = "".join(shown[one] for one in page)
        after = f"<NextMarker>{escape(left[0])}</NextMarker>" if left else "<NextMarker/>"
        text = f"<EnumerationResults><Blobs>{body}</Blobs>{after}</EnumerationResults>"
        return "200 OK", {"Content-Type": "application/xml"}, text.encode()

    def _entry(self, name: str) -> str:
        data = self.blobs[name]
        facts = f"<Content-Length>{len(data)}</Content-Length><Etag>{_tag(data)}</Etag><BlobType>BlockBlob</BlobType>"
        dated = f"<Last-Modified>{formatdate(usegmt=True)}</Last-Modified><Content-Type>x</Content-Type>"
        return f"<Blob><Name>{escape(name)}</Name><Properties>{dated}{facts}</Properties></Blob>"

    def _batch(self, body: bytes) -> Answer:
        border = body.split(b"\r\n", 1)[0]
        answers = list[bytes]()
        for number, part in enumerate(body.split(border)[1:-1]):
            line = next(line for line in part.split(b"\r\n") if line.startswith(b"DELETE "))
            name = unquote(line.split(b" ")[1].decode().partition("?")[0].split("/", 3)[3])
            code = b"202 Accepted" if self.blobs.pop(name, None) is not None else b"404 Not Found"
            head = b"Content-Type: application/http\r\nContent-ID: %d\r\n\r\n" % number
            answers.append(border + b"\r\n" + head + b"HTTP/1.1 " + code + b"\r\nx-ms-request-id: 1\r\n\r\n")
        kind = {"Content-Type": f"multipart/mixed; boundary={border.decode()[2:]}"}
        return "202 Accepted", kind, b"\r\n".join(answers) + b"\r\n" + border + b"--\r\n"


def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """Answer a request of /ACCOUNT/CONTAINER/BLOB."""
    query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"], keep_blank_values=True).items()}
    headers = {name[5:].lower().replace("_", "-"): str(value) for name, value in environ.items() if name[:5] == "HTTP_"}
    _, _, container, *name = environ["PATH_INFO"].encode("latin-1").decode().split("/", 3)
    found = _CONTAINERS.get(container)
    body, method = environ["wsgi.input"].read(), environ["REQUEST_METHOD"]
    if "authorization" not in headers and "sig" not in query:
        answer = _refused("403 Forbidden", "AuthenticationFailed")
    elif method == "PUT" and query.get("restype") == "container" and not query.get("comp"):
        _CONTAINERS[container] = Container()
        answer = "201 Created", {}, b""
    elif found is None:
        answer = _refused("404 Not Found", "ContainerNotFound")
    else:
        answer = found.answer(method, "".join(name), query, headers, body)
    status, shown, data = answer
    start(status, [("x-ms-request-id", "1"), ("x-ms-version", "2024-08-04"), *shown.items()])
    return [data]


_CONTAINERS: dict[str, Container] = {"cairn": Container()}


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _refused(status: str, code: str) -> Answer:
    text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return status, {"Content-Type": "application/xml", "x-ms-error-code": code}, text.encode()


async def main() -> None:
    """Serve until standard input ends."""
    await serve_until_end(Application(application))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
