"""The files of a network of one's own in a store: `code/<sha256>.py`, read by digest and only where they may run.

Imports no torch, because the process that opens a run holds no tensors.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from cairn.model.configuration.network import ModelConfig
from cairn.storage.errors import IntegrityError
from cairn.storage.stores import codec
from cairn.storage.stores.object_store import ExpectedObject, ObjectStore, check_object, read_verified
from cairn.tasks.configuration.network_module import MOST_BYTES, require_allowed


def keep_files(store: ObjectStore, model: ModelConfig, files: Mapping[str, bytes]) -> None:
    """Store each file of the module that this command was given, once."""
    for name, sha256 in (model.files or {}).items():
        with suppress(IntegrityError):  # missing or damaged
            check_object(store, promised_file(store, name, sha256))
            continue
        if codec.sha256(files.get(name, b"")) == sha256:
            store.write(_key(sha256), files[name])


def read_files(store: ObjectStore, model: ModelConfig, allowed: Sequence[str]) -> dict[str, bytes]:
    """Return the bytes of the module's files by name, none for another network.

    Raises InvalidConfiguration unless each of them is allowed, and IntegrityError if one is missing or has changed.
    """
    require_allowed(model, allowed)
    promised = {name: promised_file(store, name, sha256) for name, sha256 in (model.files or {}).items()}
    return {name: bytes(read_verified(store, expected)) for name, expected in promised.items()}


def promised_file(store: ObjectStore, name: str, sha256: str) -> ExpectedObject:
    """Return the stored file; raises IntegrityError if it is missing."""
    if (size := store.size(_key(sha256))) is None or size > MOST_BYTES:
        problem = "missing" if size is None else f"{size:,} bytes"
        raise IntegrityError(f"{_key(sha256)}: {problem}, and the run's network is made by it ({name}); restore it")
    return ExpectedObject(key=_key(sha256), bytes=size, sha256=sha256)


def _key(sha256: str) -> str:
    return f"code/{sha256}.py"
