"""`state_sha256`: the digest of a train state, independent of sharding, world size, time and host.

It covers name, dtype, shape and bytes of every tensor in name order, each length-prefixed so that different states
never give the same byte string.
"""

import hashlib
import struct
from collections.abc import Iterable

from storage.checkpoints.tensor_record import TensorRecord

_TITLE = b"cairn train state 1\n"


def state_sha256(records: Iterable[TensorRecord]) -> str:
    """Return the hex digest of the records; two states have equal digests if and only if they have equal bits.

    Records that arrive in name order are digested as they arrive.
    """
    digest, seen, ordered = hashlib.sha256(_TITLE), list[TensorRecord](), True
    for record in records:
        ordered = ordered and not (seen and record.name < seen[-1].name)
        seen.append(record)
        if ordered:
            _update(digest, record)
    if ordered:
        return digest.hexdigest()
    digest = hashlib.sha256(_TITLE)
    for record in sorted(seen, key=lambda record: record.name):
        _update(digest, record)
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", record: TensorRecord) -> None:
    for text in (record.name, record.dtype, ",".join(map(str, record.shape))):
        encoded = text.encode()
        digest.update(struct.pack("<Q", len(encoded)) + encoded)
    digest.update(struct.pack("<Q", record.data.nbytes))
    digest.update(record.data)
