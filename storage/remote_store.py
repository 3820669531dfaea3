"""A store behind fsspec, made and measured for `s3://` through s3fs.

The one conditional write used is a single small PUT with If-None-Match: * (RFC 9110, section 13.1.2), which
s3fs sends for `mode='create'`; every other answer than a clean success is left to the run log to settle by
reading back. Listing caches and shared instances are off: both serve stale names.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from storage.errors import ObjectMissing, StorageError, StoreUnavailable
from storage.object_store import WrittenObject, checked_key

_STREAM_PART_BYTES = 16 * 1024 * 1024
_EXISTS_CODES = frozenset({"PreconditionFailed", "412"})


class RemoteStore:
    """An `ObjectStore` over one fsspec file system and a root path in it."""

    def __init__(self, url: str) -> None:
        """Open the file system `url` names, with its own credential chain and no caches."""
        import fsspec

        protocol = url.split("://", 1)[0]
        self._url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, **_options(protocol))
        except (ValueError, ImportError) as error:
            raise StorageError(f"store {url!r}: cannot be opened: {error}; choose another --store") from error
        if hasattr(self._fs, "retries"):
            self._fs.retries = 2

    @property
    def url(self) -> str:
        """Where this store is, without credentials."""
        return self._url

    def read(self, key: str) -> bytes:
        """Return the object's bytes; raise `ObjectMissing` where there is none."""
        try:
            data: bytes = self._fs.cat_file(self._path(key))
        except FileNotFoundError as missing:
            raise ObjectMissing(f"{self.url}/{key}: no such object") from missing
        except Exception as error:
            raise self._unavailable("read", key, error) from error
        return data

    def create(self, key: str, data: bytes) -> bool:
        """Create the object only if absent: True when this call made it, False when one was there."""
        try:
            self._fs.pipe_file(self._path(key), data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            if _error_code(error) in _EXISTS_CODES:
                return False
            raise self._unavailable("create", key, error) from error
        return True

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite in one PUT."""
        try:
            self._fs.pipe_file(self._path(key), data)
        except Exception as error:
            raise self._unavailable("write", key, error) from error

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
        """Upload chunks as one object (multipart above one part), hashing on the way."""
        digest, size = hashlib.sha256(), 0
        try:
            file = self._fs.open(self._path(key), "wb", block_size=_STREAM_PART_BYTES)
            try:
                for chunk in chunks:
                    digest.update(chunk)
                    size += file.write(chunk)
            except BaseException:
                file.discard()
                file.closed = True
                raise
            file.close()
        except Exception as error:
            raise self._unavailable("upload", key, error) from error
        return WrittenObject(bytes=size, sha256=digest.hexdigest())

    def keys(self, prefix: str) -> list[str]:
        """Return all keys under the folder `prefix`, sorted."""
        try:
            found = self._fs.find(self._path(prefix))
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._unavailable("list", prefix, error) from error
        return sorted(path[len(self._root) + 1 :] for path in found)

    def first(self, prefix: str) -> str | None:
        """Return the smallest key under the folder `prefix`: one request on S3, a full listing elsewhere."""
        if not hasattr(self._fs, "call_s3"):
            return next(iter(self.keys(prefix)), None)
        bucket, _, path = self._path(prefix).partition("/")
        try:
            answer = self._fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=path + "/", MaxKeys=1)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._unavailable("list", prefix, error) from error
        names = [item["Key"] for item in answer.get("Contents", ())]
        return f"{bucket}/{names[0]}"[len(self._root) + 1 :] if names else None

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None where there is no object."""
        try:
            found = self._fs.info(self._path(key))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._unavailable("stat", key, error) from error
        return int(found["size"]) if found["type"] == "file" else None

    def delete(self, key: str) -> None:
        """Delete the object if it is there."""
        try:
            self._fs.rm_file(self._path(key))
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._unavailable("delete", key, error) from error

    def local_path(self, key: str) -> Path | None:
        """Return None: the bytes are elsewhere."""
        checked_key(key)
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    def _unavailable(self, doing: str, key: str, error: BaseException) -> StoreUnavailable:
        return StoreUnavailable(f"{self.url}/{key}: cannot {doing}: {type(error).__name__}: {error}")


def _options(protocol: str) -> dict[str, Any]:
    if protocol != "s3":
        return {}
    client = {"retries": {"total_max_attempts": 2}, "read_timeout": 60, "max_pool_connections": 32}
    return {"use_listings_cache": False, "config_kwargs": client}


def _error_code(error: BaseException) -> str:
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
