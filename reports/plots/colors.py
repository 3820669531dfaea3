"""The plot's colours, safe for colour-blind readers (Okabe and Ito, 2008)."""

from typing import Literal

from cairn.tasks.policy.termination import TerminationReason

Dashes = Literal["solid", "dashed", "dotted"]

BLACK, GREY, PALE = "#000000", "#6b6b6b", "#d9d9d9"
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILLION, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
_REASONS: dict[str, tuple[str, Dashes]] = {
    TerminationReason.PREEMPTED: (SKY, "solid"),
    TerminationReason.LOST: (ORANGE, "solid"),
    TerminationReason.OOM: (PURPLE, "solid"),
    TerminationReason.BAD_DATA: (GREEN, "solid"),
    TerminationReason.DIVERGED: (BLACK, "dashed"),
    TerminationReason.HUNG: (PURPLE, "dashed"),
    TerminationReason.TOO_FEW_MACHINES: (SKY, "dashed"),
    TerminationReason.STORAGE: (GREEN, "dashed"),
    TerminationReason.ERROR: (BLACK, "solid"),
    TerminationReason.CANCELLED: (GREY, "dashed"),
    TerminationReason.FENCED: (GREY, "dotted"),
}


def reason_style(reason: str) -> tuple[str, Dashes]:
    """Return colour and line style of a termination reason; black and dotted where it is unknown."""
    return _REASONS.get(reason, (BLACK, "dotted"))
