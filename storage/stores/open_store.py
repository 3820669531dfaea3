"""Opens the store of a URL."""

import os
import re
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from cairn.storage.errors import StorageError
from cairn.storage.stores import local_store, object_store, redaction

_CLOUDS: dict[str, Literal["gs", "az"]] = {"gs": "gs", "gcs": "gs", "az": "az", "azure": "az"}
_OTHER_NAMES = ("abfs", "abfss", "adl", "wasb", "wasbs")
"""Schemes of Azure whose addresses hold the account too."""
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def open_store(url: str) -> object_store.ObjectStore:
    """Open `./folder`, `file://…`, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.

    A remote store retries idempotent operations for some seconds. Raises StorageError for an empty URL, any other
    scheme, a file, a URL with credentials, or a chain of file systems (their caches are stale).
    """
    if not url:
        raise StorageError("store '': must be a folder or a URL such as ./cairn-store or s3://bucket/prefix")
    problem = redaction.find_credentials(url, instead="the environment or the credentials file")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", url):
        if problem:
            raise StorageError(f"store URL {problem}")
        meant = url.replace(":/", ":///" if url.startswith("file:") else "://", 1)
        raise StorageError(f"store {url}: did you mean {meant}? For a folder of that name: ./{url}")
    if "://" not in url:
        try:
            return _open_folder(Path(url).expanduser() if url.startswith("~") else Path(url))
        except RuntimeError as unknown:
            home = url.partition("/")[0]
            raise StorageError(f"store {url}: no home folder is known for {home!r}; write the whole path") from unknown
    if problem and url.partition("://")[0] not in _OTHER_NAMES:  # they have containers before the @
        raise StorageError(f"store URL {problem}")
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _open_folder(path_of(url))
    if "::" in url:
        raise StorageError("store URL is a chain ('::'): name the store itself; caches in between serve stale names")
    is_s3, cloud = parts.scheme in ("s3", "s3a"), _CLOUDS.get(parts.scheme)
    if (is_s3 or cloud) and (not parts.netloc or parts.query or parts.fragment):
        kind = cloud or "s3"
        raise StorageError(f"store URL {kind}://: must be {kind}://BUCKET or {kind}://BUCKET/PREFIX, without ? and #")
    if cloud:
        from cairn.storage.stores.cloud_store import CloudStore

        return CloudStore(cloud, parts.netloc, parts.path)
    if is_s3:
        from cairn.storage.stores.s3_bucket import S3Bucket
        from cairn.storage.stores.s3_store import S3Store

        return S3Store(S3Bucket(parts.netloc), parts.path)
    why = "no store of this kind is known to have an atomic create-if-absent"
    if parts.scheme in _OTHER_NAMES:
        why = "the account of Azure stands in AZURE_STORAGE_ACCOUNT_NAME: write az://CONTAINER/PREFIX"
    rule = "a folder, file://FOLDER, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
    raise StorageError(f"store {parts.scheme}://: {why}; choose another --store: {rule}")


def path_of(url: str) -> Path:
    """Return the path that a `file://` URL means; raises StorageError where it is not a whole one, or has ? or #."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise StorageError(f"{url}: must be file:///PATH, a whole path with %23 for # and %3F for ?; or write a path")
    return Path(unquote(parts.path))


def _open_folder(path: Path) -> local_store.LocalStore:
    if _NO_TEXT.search(str(path.absolute())):  # no log could name it
        raise StorageError(f"store {os.fsencode(path)!r}: must be UTF-8 without control characters; rename the folder")
    if path.exists() and not path.is_dir():
        raise StorageError(f"store {path}: is not a folder, cannot be written or read; choose another --store")
    return local_store.LocalStore(path)
