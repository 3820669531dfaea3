"""`state_sha256`: what a train state is, independent of sharding, world size, time and host.

The digest runs over name, dtype, shape and bytes of every tensor in name order, each length-prefixed so that no two
different states share one byte string.
"""

import hashlib
import struct
from collections.abc import Iterable

from storage.checkpoints.tensor_record import TensorRecord


def state_sha256(records: Iterable[TensorRecord]) -> str:
    """Return the hex digest of the records' content; two states are equal bit for bit when theirs are."""
    digest = hashlib.sha256(b"cairn train state 1\n")
    for record in sorted(records, key=lambda record: record.name):
        for text in (record.name, record.dtype, ",".join(map(str, record.shape))):
            encoded = text.encode()
            digest.update(struct.pack("<Q", len(encoded)) + encoded)
        digest.update(struct.pack("<Q", record.data.nbytes))
        digest.update(record.data)
    return digest.hexdigest()
