"""A change of the processes that train an attempt: an entry of its own, because the attempt goes on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MembersChanged:
    """Ranks of an attempt were `lost`, or `joined` it, and those `remaining` train from `step` on.

    Ranks are numbered as the attempt began, and those that joined further on; they run on `hosts`. A loss is `charged`
    as an end would be. Also the trainer's message.
    """

    attempt: int
    step: int
    lost: tuple[int, ...]
    remaining: tuple[int, ...]
    detail: str
    charged: str | None = None
    joined: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
