"""A set of 128-bit digests in one flat table: which texts were seen already.

Owns the bound on memory: 16 bytes a slot in a table two thirds full at most, so 24 to 48 bytes for each text, where
Python's own set takes about a hundred. Refuses to know what was hashed. Source: Knuth, TAOCP 3, 6.4, algorithm L.
"""

_SLOT_BYTES = 16
_EMPTY = bytes(_SLOT_BYTES)
_FIRST_SLOTS = 1 << 12


class SeenDigests:
    """Remembers the first 128 bits of sha256 digests; two texts that share them are one in 2^64 corpora."""

    def __init__(self) -> None:
        self._slots = _FIRST_SLOTS
        self._table = bytearray(_FIRST_SLOTS * _SLOT_BYTES)
        self._count = 0

    def __len__(self) -> int:
        """Return how many different digests were added."""
        return self._count

    @property
    def table_bytes(self) -> int:
        """Memory of the table, in bytes."""
        return len(self._table)

    def add(self, sha256: str) -> bool:
        """Remember a hex digest; returns whether it is new."""
        digest = bytes.fromhex(sha256[: 2 * _SLOT_BYTES])
        place = self._place_of(digest)
        if self._table[place : place + _SLOT_BYTES] == digest:
            return False
        self._table[place : place + _SLOT_BYTES] = digest
        self._count += 1
        if 3 * self._count > 2 * self._slots:
            self._grow()
        return True

    def _place_of(self, digest: bytes) -> int:
        slot = int.from_bytes(digest[:8], "little") & (self._slots - 1)
        while True:
            place = slot * _SLOT_BYTES
            held = self._table[place : place + _SLOT_BYTES]
            if held in (_EMPTY, digest):
                return place
            slot = (slot + 1) & (self._slots - 1)

    def _grow(self) -> None:
        before, self._slots = self._table, 2 * self._slots
        self._table = bytearray(self._slots * _SLOT_BYTES)
        for start in range(0, len(before), _SLOT_BYTES):
            digest = bytes(before[start : start + _SLOT_BYTES])
            if digest != _EMPTY:
                place = self._place_of(digest)
                self._table[place : place + _SLOT_BYTES] = digest
