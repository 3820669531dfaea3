"""Opens the store of a URL."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cairn.storage.errors import StorageError
from cairn.storage.stores import local_store, object_store, redaction

_NOT_SPOKEN = {"Google Cloud Storage": ("gs", "gcs"), "Azure Blob Storage": ("az", "abfs", "abfss", "adl")}
"""Stores with an atomic create of their own, by their schemes; Cairn does not speak their APIs."""


def open_store(url: str) -> object_store.ObjectStore:
    """Open `./folder`, `file://…` or `s3://bucket/prefix`.

    A remote store retries idempotent operations for some seconds. Raises StorageError for an empty URL, any other
    scheme, a file, a URL with credentials, or a chain of file systems (their caches are stale).
    """
    if not url:
        raise StorageError("store '': must be a folder or a URL such as ./cairn-store or s3://bucket/prefix")
    problem = redaction.find_credentials(url, instead="the environment or the credentials file")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", url):
        if problem:
            raise StorageError(f"store URL {problem}")
        meant = url.replace(":/", "://", 1)
        raise StorageError(f"store {url}: did you mean {meant}? For a folder of that name: ./{url}")
    if "://" not in url:
        try:
            return _open_folder(Path(url).expanduser())
        except RuntimeError as unknown:
            home = url.partition("/")[0]
            raise StorageError(f"store {url}: no home folder is known for {home!r}; write the whole path") from unknown
    if "::" in url:
        raise StorageError("store URL is a chain ('::'): name the store itself; caches in between serve stale names")
    parts = urlsplit(url)
    if problem and parts.scheme not in _NOT_SPOKEN["Azure Blob Storage"]:  # it has containers before the @
        raise StorageError(f"store URL {problem}")
    if parts.scheme == "file":
        return _open_folder(Path(unquote(parts.path)))
    if parts.scheme in ("s3", "s3a"):
        from cairn.storage.stores.s3_bucket import S3Bucket
        from cairn.storage.stores.s3_store import S3Store

        if not parts.netloc or parts.query or parts.fragment:
            raise StorageError("store URL s3://: must be s3://bucket or s3://bucket/prefix, without ? and #")
        return S3Store(S3Bucket(parts.netloc), parts.path)
    why = "no store of this kind is known to have an atomic create-if-absent"
    if name := next((name for name, schemes in _NOT_SPOKEN.items() if parts.scheme in schemes), ""):
        why = f"{name} is not supported, and an S3-compatible endpoint of it (s3://, AWS_ENDPOINT_URL) was never tried"
        why += ": ask `cairn doctor` whether its create-if-absent is atomic"
    rule = "a folder, file://FOLDER or s3://BUCKET/PREFIX"
    raise StorageError(f"store {parts.scheme}://: {why}; choose another --store: {rule}")


def _open_folder(path: Path) -> local_store.LocalStore:
    if path.exists() and not path.is_dir():
        raise StorageError(f"store {path}: is not a folder, cannot be written or read; choose another --store")
    return local_store.LocalStore(path)
