"""The manifest of a checkpoint: immutable JSON with the size and SHA-256 of every payload object."""

import re
from dataclasses import dataclass

from storage.errors import IntegrityError
from storage.stores.document import decode

MANIFEST_VERSION = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestObject:
    """One payload object; `name` is a plain name inside the checkpoint's folder."""

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"object name {self.name!r}: must match {_NAME.pattern}; it may not leave its folder")
        if self.bytes < 0:
            raise ValueError(f"object {self.name}: bytes {self.bytes}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The objects of a checkpoint; the manifest's own SHA-256 identifies the checkpoint in the log."""

    version: int
    run_id: str
    attempt: int
    step: int
    state_sha256: str
    objects: tuple[ManifestObject, ...]


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Return the manifest in `data`; raise `IntegrityError` naming `where` if it is malformed or newer."""
    manifest = decode(data, Manifest, where=where)
    if manifest.version > MANIFEST_VERSION:
        raise IntegrityError(f"{where}: version {manifest.version} is newer than {MANIFEST_VERSION}; update cairn")
    return manifest
