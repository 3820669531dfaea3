"""A change of the processes that train an attempt: an entry of its own, because the attempt goes on."""

from dataclasses import dataclass

from cairn.storage.errors import StorageError


@dataclass(frozen=True, kw_only=True, slots=True)
class MembersChanged:
    """Ranks of an attempt were `lost`, and those `left` computed `step` without them; `charged` as an end would be.

    Ranks are numbered as the attempt began.
    """

    attempt: int
    step: int
    lost: tuple[int, ...]
    left: tuple[int, ...]
    detail: str
    charged: str | None = None

    def __post_init__(self) -> None:
        if not self.lost or 0 not in self.left:
            raise StorageError(f"members-changed: lost {self.lost}, left {self.left}: some are lost, and never rank 0")
