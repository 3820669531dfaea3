"""Writes the plot of a run to a file for `cairn plot`."""

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reports.plots.run_curves import gather_curves
from storage.logs.run_log import RunLog
from storage.stores.document import sha256
from tasks.errors import InvalidConfiguration

_SUFFIXES = (".png", ".svg")
_LEAST_PX, _GREATEST_PX = 300, 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotRequest:
    """Which file, how large, and what runs along the axis at the bottom; the other one is written at the top."""

    file: Path
    width_px: int
    height_px: int
    across: Literal["step", "tokens"]

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn, by name."""
        if self.file.suffix.lower() not in _SUFFIXES:
            raise InvalidConfiguration(f"{self.file}: must end in {' or '.join(_SUFFIXES)}; the suffix says the format")
        if not self.file.absolute().parent.is_dir():
            raise InvalidConfiguration(f"{self.file}: its folder does not exist; make it first")
        for name, value in (("width", self.width_px), ("height", self.height_px)):
            if not _LEAST_PX <= value <= _GREATEST_PX:
                raise InvalidConfiguration(f"--{name} {value}: must be {_LEAST_PX} to {_GREATEST_PX} pixels")


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPlot:
    """What was written, and what can be seen on it."""

    run_id: str
    file: str
    bytes: int
    sha256: str
    width_px: int
    height_px: int
    last_step: int
    attempts: int
    interruptions: Mapping[str, int]


def plot_run(log: RunLog, request: PlotRequest) -> WrittenPlot:
    """Draw a run that was read into the file; raises `InvalidConfiguration` where it cannot be written."""
    from reports.plots.curve_plot import draw_png, draw_svg  # numpy and matplotlib: only who draws pays for them

    curves = gather_curves(log)
    draw = draw_svg if request.file.suffix.lower() == ".svg" else draw_png
    picture = draw(curves, width_px=request.width_px, height_px=request.height_px, across=request.across)
    write_whole(request.file, picture)
    return WrittenPlot(
        run_id=curves.run_id,
        file=str(request.file),
        bytes=len(picture),
        sha256=sha256(picture),
        width_px=request.width_px,
        height_px=request.height_px,
        last_step=curves.last_step,
        attempts=curves.attempts,
        interruptions=dict(curves.reasons),
    )


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file at once, so that whoever shows it while it is drawn anew never shows half of it."""
    temporary = path.absolute().parent / f".{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:  # what others may do with it is the umask's
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise InvalidConfiguration(f"{path}: cannot be written: {error}") from error
