"""The plot's colours, safe for colour-blind readers (Okabe and Ito, 2008), and the 256 fixed ones of a PNG."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tasks.policy.termination import TerminationReason

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
_GREYS, _FADES = 53, 29  # with seven hues, 256


def reason_style(reason: str) -> tuple[str, Dashes]:
    """Return colour and line style of a termination reason; black and dotted where it is unknown."""
    return _REASONS.get(reason, (BLACK, "dotted"))


def pixel_colors() -> NDArray[np.uint8]:
    """Return the 256 colours, one a row, as red, green, blue."""
    greys = [(level, level, level) for level in np.linspace(0, 255, _GREYS)]
    hues = [
        np.frombuffer(bytes.fromhex(color[1:]), np.uint8)
        for color in (BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE, YELLOW)
    ]
    fades = np.linspace(1, 0.04, _FADES)
    faded = [255 - fade * (255.0 - hue) for hue in hues for fade in fades]
    return np.array([*greys, *faded]).round().astype(np.uint8)


def nearest_colors(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the number of the nearest colour for each pixel; the last axis is red, green, blue and the rest."""
    red, green, blue = (pixels[..., channel].astype(np.int64) for channel in range(3))
    seen, number = np.unique(red << 16 | green << 8 | blue, return_inverse=True)
    colors = np.stack((seen >> 16, seen >> 8 & 255, seen & 255), axis=-1)
    palette = pixel_colors().astype(np.int64)
    distances = (palette**2).sum(axis=-1) - 2 * colors @ palette.T  # and the square of the color, the same for all
    nearest: NDArray[np.uint8] = distances.argmin(axis=-1).astype(np.uint8)
    return nearest[number].reshape(pixels.shape[:-1])
