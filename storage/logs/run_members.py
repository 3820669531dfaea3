"""A change of the processes that train an attempt: an entry of its own, because the attempt goes on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MembersChanged:
    """Ranks of an attempt were `lost`, and those `remaining` go on from `step` on; `charged` as an end would be.

    Ranks are numbered as the attempt began. Also the trainer's message.
    """

    attempt: int
    step: int
    lost: tuple[int, ...]
    remaining: tuple[int, ...]
    detail: str
    charged: str | None = None
