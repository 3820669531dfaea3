"""The manifest of a checkpoint: every payload object with size and sha256. Immutable JSON.

Owns the record, its codec and the rule that object names are plain names inside the checkpoint's own folder.
"""

import re
from dataclasses import dataclass

from storage.errors import IntegrityError
from storage.stores.document import decode, encode

MANIFEST_VERSION = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestObject:
    """One payload object: plain name, size, digest."""

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuse names that could point outside the checkpoint's folder."""
        if not _NAME.match(self.name):
            raise ValueError(f"object name {self.name!r}: must match {_NAME.pattern}; it may not leave its folder")
        if self.bytes < 0:
            raise ValueError(f"object {self.name}: bytes {self.bytes}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint consists of; its own sha256 is the checkpoint's name in the log."""

    version: int
    run_id: str
    attempt: int
    step: int
    state_sha256: str
    objects: tuple[ManifestObject, ...]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's bytes."""
    return encode(manifest)


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Return the manifest in `data`; raise `IntegrityError` naming `where` on anything malformed or newer."""
    manifest = decode(data, Manifest, where=where)
    if manifest.version > MANIFEST_VERSION:
        raise IntegrityError(f"{where}: version {manifest.version} is newer than {MANIFEST_VERSION}; update cairn")
    return manifest
