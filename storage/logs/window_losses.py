"""Losses of an evaluation by held-out window, beside the log: one object, named by the SHA-256 of its bytes.

Not in the entry: 320 windows would double its 2.5 kB, and the cached fold, for what only a comparison reads; and a
deleted run keeps its log.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from cairn.storage.errors import IntegrityError, ObjectMissing
from cairn.storage.stores import codec, object_store

_DIGITS = 5
"""Decimal places that are kept: a rounding of 0.00001 nats is a thousandth of the error of a usual slice."""
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowLosses:
    """Losses in nats per token of the windows of `window_tokens` behind each metric, in the data's order."""

    window_tokens: int
    losses: Mapping[str, tuple[float, ...]]
    version: int = 1


def losses_folder(run_prefix: str) -> str:
    """Return the folder of a run's losses by window."""
    return f"{run_prefix}/window-losses"


def write_losses(store: object_store.ObjectStore, run_prefix: str, losses: WindowLosses) -> str:
    """Write the object and return the hash that names it."""
    rounded = {name: tuple(round(loss, _DIGITS) for loss in of) for name, of in losses.losses.items()}
    data = msgspec.json.encode(replace(losses, losses=rounded), order="sorted")
    store.write(f"{losses_folder(run_prefix)}/{codec.sha256(data)}.json", data)
    return codec.sha256(data)


def read_losses(store: object_store.ObjectStore, run_prefix: str, digest: str) -> WindowLosses:
    """Read the object; raises `IntegrityError` if it is missing or its bytes have another hash."""
    if not _SHA256.fullmatch(digest):
        rule = "must be 64 hexadecimal digits; the log was changed"
        raise IntegrityError(f"window_losses_sha256 {digest[:80]!r}: {rule}")
    key = f"{losses_folder(run_prefix)}/{digest}.json"
    try:
        data = store.read(key)
    except ObjectMissing as missing:
        raise IntegrityError(f"{key}: is missing") from missing
    if codec.sha256(data) != digest:
        raise IntegrityError(f"{key}: sha256 {codec.sha256(data)[:12]}, its evaluation names {digest[:12]}")
    return codec.decode(data, WindowLosses, where=key)
