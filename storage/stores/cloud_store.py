"""A store in a bucket of Google Cloud Storage or a container of Azure Blob Storage, through obstore (object_store).

`create` is a single PUT that the service excludes: x-goog-if-generation-match: 0, and If-None-Match: * (RFC 9110,
section 13.1.2). Any answer but success and "exists" is unknown; the log settles it by reading back. All other requests
are idempotent and are retried for some seconds: parts of an upload by the library, everything else here.
"""

import importlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from itertools import chain
from typing import Any, Literal, TypeVar

from cairn.storage.errors import IntegrityError, ObjectMissing, StorageError, StoreFull, StoreRefused, StoreUnavailable
from cairn.storage.stores import object_store, ranged_store, redaction
from cairn.storage.stores.object_store import PART_BYTES, RetryPolicy, is_key

T = TypeVar("T")
_CONNECT_SECONDS, _ANSWER_SECONDS, _TRANSFER_SECONDS, _RETRY_SECONDS = 3, 10, 180, 10
"""Limits of a connection, of a small request, of a part's at 100 kB/s, the slowest connection worth using, and of the
library's retries.
"""
_CONCURRENT_PARTS = 3
_TOKEN = "cairn_write"
_ENDPOINTS = ("GOOGLE_BASE_URL", "AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_FULL = re.compile(r"status code: 507|QuotaExceeded|InsufficientStorage")
_BEYOND = re.compile(r"status code: 416|Wanted range starting at")
_NO_TOKEN = re.compile(r"token request|authorization request|MissingAccount|Account must be specified|credential", re.I)
_LONGEST_MESSAGE = 500
_RETRY_POLICY = RetryPolicy()


class CloudStore(ranged_store.RangedStore):
    """An `ObjectStore` below one prefix of a bucket or container.

    Uploads that were never finished cannot be listed through the library: a rule of the bucket's lifecycle deletes
    them (Azure forgets them after a week).
    """

    def __init__(
        self, cloud: Literal["gs", "az"], bucket: str, prefix: str = "", *, retry_policy: RetryPolicy = _RETRY_POLICY
    ) -> None:
        """Prepare the clients; the first request looks for credentials. Raises StoreRefused without the library."""
        self._root, self._retry_policy, self._advice = f"{cloud}://{bucket}", retry_policy, object_store.advice()[cloud]
        self._below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        if find_spec("obstore") is None:
            raise StoreRefused(f"store {self._root}: needs what the extra 'clouds' of cairn-train installs")
        self._library: Any = importlib.import_module("obstore")
        with self._convert_errors("open", ""):
            self._small = _client(cloud, bucket, seconds=_ANSWER_SECONDS)
            self._large = _client(cloud, bucket, seconds=_TRANSFER_SECONDS)
            self._uploads = _client(cloud, bucket, seconds=_TRANSFER_SECONDS, tries=4)

    def read(self, key: str, *, at_most_bytes: int = object_store.MAX_READ_BYTES) -> bytes:
        """Return the object's bytes in one GET; raises ObjectMissing, or IntegrityError for a larger object."""
        return self._retry_policy.call(self._fetch, self._name(key), {}, at_most_bytes).data

    def create(self, key: str, data: bytes) -> bool:
        """Create the object if it is absent, in one PUT; returns False if it exists."""
        name = self._name(key)
        with self._convert_errors("create", name), suppress(self._library.exceptions.AlreadyExistsError):
            self._library.put(self._small, name, data, mode="create", use_multipart=False)
            return True
        return False

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite the object in one PUT."""
        name, client = self._name(key), self._large if len(data) >= 1 << 20 else self._small
        self._call("write", name, lambda: self._library.put(client, name, data, use_multipart=False))

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write chunks as one object, in parts above 16 MiB; returns its bytes. An error leaves nothing behind."""
        pieces, first, size_bytes, failed = iter(chunks), bytearray(), 0, list[BaseException]()
        while len(first) <= PART_BYTES:
            if (piece := next(pieces, None)) is None:
                self.write(key, bytes(first))
                return len(first)
            first += piece

        def counted() -> Iterator[bytes]:
            nonlocal size_bytes
            try:
                for piece in chain((first,), pieces):
                    size_bytes += len(piece)
                    yield bytes(piece)  # the library keeps it until it is sent; its producer uses the memory again
            except BaseException as error:
                failed.append(error)
                raise

        name, token = self._name(key), uuid.uuid4().hex
        options = {"attributes": {_TOKEN: token}, "chunk_size": PART_BYTES, "max_concurrency": _CONCURRENT_PARTS}
        try:
            with self._convert_errors("upload", name):
                self._library.put(self._uploads, name, counted(), **options)
        except StoreRefused:
            raise
        except (ObjectMissing, StoreUnavailable) as unknown:
            # The upload is gone or the answer was lost: it succeeded if the object is this one.
            if failed:
                raise failed[0] from None
            if self._token(name) != token:
                raise StoreUnavailable(f"{self._root}/{name}: cannot upload: {unknown}") from unknown
        return size_bytes

    def _token(self, name: str) -> str:
        with suppress(ObjectMissing):
            head = {"head": True}
            found = self._call("stat", name, lambda: self._library.get(self._small, name, options=head).attributes)
            return str(found.get(_TOKEN))
        return ""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of every object below the folder `prefix`, in one request per thousand."""
        folder = self._name(prefix)
        found = self._call("list", folder, lambda: self._library.list(self._small, folder).collect())
        sizes = ((self._key(item["path"]), int(item["size"])) for item in found)
        return dict(sorted((key, size) for key, size in sizes if is_key(key)))

    def folders(self, prefix: str) -> list[str]:
        """Return the folders directly below the folder `prefix`, sorted; their objects are not listed."""
        folder = self._name(prefix)
        found = self._call("list", folder, lambda: self._library.list_with_delimiter(self._small, folder))
        return sorted(filter(is_key, (self._key(name.rstrip("/")) for name in found["common_prefixes"])))

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly below the folder `prefix`, in one request unless folders precede it."""
        folder = self._name(prefix)

        def find_first() -> str | None:
            names = (item["path"] for page in self._library.list(self._small, folder, chunk_size=1) for item in page)
            keys = (self._key(name) for name in names if "/" not in name.removeprefix(f"{folder}/"))
            return next(filter(is_key, keys), None)

        return self._call("list", folder, find_first)

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None if it is absent."""
        with suppress(ObjectMissing):
            return int(self._head(key)["size"])
        return None

    def age_seconds(self, key: str) -> float | None:
        """Return the whole seconds between two objects' times, of this one and of one that is written to ask the clock.

        The library shows no answer's own time. None where nothing may be written.
        """
        clock = f"probe/clock-{uuid.uuid4().hex}"
        with suppress(ObjectMissing, StoreRefused):
            written = self._head(key)["last_modified"]
            self.write(clock, b"")
            now = self._head(clock)["last_modified"]
            self.delete(clock)
            return float((now - written).total_seconds())
        return None

    def delete(self, key: str) -> None:
        """Delete the object if it exists, in one request."""
        name = self._name(key)
        with suppress(ObjectMissing):
            self._call("delete", name, lambda: self._library.delete(self._small, name))

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete these objects, many at once; one by one where some were gone already."""
        names = list(map(self._name, keys))
        try:
            self._call("delete", "", lambda: self._library.delete(self._small, names))
        except StorageError:
            for key in keys:
                self.delete(key)  # says for which of them, and why

    def _call(self, action: str, name: str, request: Callable[[], T]) -> T:
        return self._retry_policy.call(self._convert_errors(action, name)(request))

    def _head(self, key: str) -> Any:
        name = self._name(key)
        return self._call("stat", name, lambda: self._library.head(self._small, name))

    def _fetch_range(self, name: str, start: int, size: int, etag: str | None = None) -> ranged_store.Fetched:
        options = {"range": (start, start + size), **({} if etag is None else {"if_match": etag})}
        try:
            return self._fetch(name, options, size)
        except StoreUnavailable as error:
            if etag or not _BEYOND.search(str(error.__cause__)):
                raise
            return ranged_store.Fetched(data=b"", etag="", total_bytes=0)  # an answer, not a fault to wait out

    def _fetch(self, name: str, options: dict[str, Any], at_most_bytes: int) -> ranged_store.Fetched:
        where = f"{self._root}/{name}"
        try:
            with self._convert_errors("read", name, self._library.exceptions.PreconditionError):
                answer = self._library.get(self._large, name, options=options)
                begin, end = answer.range
                if end - begin > at_most_bytes:
                    raise object_store.too_large(where, at_most_bytes)
                data, meta = bytes(answer.bytes()), answer.meta
        except self._library.exceptions.PreconditionError as changed:
            raise IntegrityError(f"{where}: was replaced while it was read") from changed
        return ranged_store.Fetched(data=data, etag=str(meta["e_tag"]), total_bytes=int(meta["size"]))

    @contextmanager
    def _convert_errors(self, action: str, name: str, *kept: type[Exception]) -> Iterator[None]:
        """Raise the storage error for an exception that the library raises during `action`."""
        errors, where = self._library.exceptions, f"{self._root}/{name}"
        try:
            yield
        except (errors.AlreadyExistsError, *kept):
            raise
        except (errors.BaseError, OSError, ValueError) as error:
            whole = str(error)
            message = redaction.redact(" ".join(whole.partition("\n\nDebug source")[0].split()))[:_LONGEST_MESSAGE]
            problem = f"{where}: cannot {action}: {message}"
            if _NO_BUCKET.search(whole):
                raise StoreRefused(f"{problem}; create the bucket, or name another one in --store") from error
            if _FULL.search(whole):
                advice = "(the store or its quota is full; free space and run the same command again)"
                raise StoreFull(f"{problem} {advice}") from error
            if isinstance(error, errors.NotFoundError | FileNotFoundError):
                raise ObjectMissing(f"{where}: no such object") from error
            if isinstance(error, errors.PermissionDeniedError | PermissionError):
                raise StoreRefused(f"{problem}; {self._advice['allow']}") from error
            if action == "open" or isinstance(error, errors.UnauthenticatedError):
                raise StoreRefused(f"{problem}; {self._advice['identity']}") from error
            advice = f"; {self._advice['identity']}" if _NO_TOKEN.search(whole) else ""
            raise StoreUnavailable(f"{problem}{advice}") from error


def _client(cloud: Literal["gs", "az"], bucket: str, *, seconds: int, tries: int = 1) -> Any:
    from obstore.store import AzureStore, GCSStore

    is_plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    emulated = os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
    limits = {"timeout": timedelta(seconds=seconds), "connect_timeout": timedelta(seconds=_CONNECT_SECONDS)}
    retries = {"max_retries": tries - 1, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)}
    kind: Any = GCSStore if cloud == "gs" else AzureStore
    return kind(bucket, client_options={**limits, "allow_http": is_plain or emulated}, retry_config=retries)
