"""A keyed permutation of [0, n) in constant memory: a Feistel network over an even power of two, with cycle walking.

Sources: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (cycle walking); Luby and Rackoff 1988
(Feistel); Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators" (mixing).
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.errors import InvalidInput

ROUNDS = 8
LARGEST_SIZE = 2**62

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (values ^ (values >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True, kw_only=True, slots=True)
class Permutation:
    """The permutation of [0, size) chosen by `key`; equal fields permute equally on every machine."""

    size: int
    key: str

    def __post_init__(self) -> None:
        if not 1 <= self.size <= LARGEST_SIZE:
            raise InvalidInput(f"size={self.size} must be from 1 to {LARGEST_SIZE}")

    def permute(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map positions (N,) in [0, size) to values (N,) in [0, size), one to one."""
        if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= self.size):
            raise InvalidInput(f"positions from {positions.min()} to {positions.max()} must be in [0, {self.size})")
        values = self._encipher(positions.astype(np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._encipher(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        left, right = values >> shift, values & mask
        for round_key in self._round_keys():
            left, right = right, left ^ (_mix(right + round_key) & mask)
        return (left << shift) | right

    def _round_keys(self) -> NDArray[np.uint64]:
        digest = hashlib.shake_256(f"{self.key}/{self.size}".encode()).digest(8 * ROUNDS)
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
