"""`state_sha256`: what a train state is, independent of sharding, world size, time and host.

The digest runs over name, dtype, shape and bytes of every tensor in name order, each length-prefixed so that no two
different states share one byte string.
"""

import hashlib
import struct
from collections.abc import Iterable

from storage.checkpoints.tensor_record import TensorRecord

_TITLE = b"cairn train state 1\n"


def state_sha256(records: Iterable[TensorRecord]) -> str:
    """Return the hex digest of the records' content; two states are equal bit for bit when theirs are.

    Records that come in name order are digested as they come, so what is slow to read is waited for only once.
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
