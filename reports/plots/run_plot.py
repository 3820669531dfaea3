"""Writes the plot of a run to a file for `cairn plot`."""

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cairn.reports.plots.run_curves import gather_curves
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.document import sha256
from cairn.tasks.errors import InvalidConfiguration

_SUFFIXES = (".png", ".svg")
_LEAST_PX, _GREATEST_PX = 300, 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotRequest:
    """File and size of a plot, and the unit of its lower axis; the upper axis has the other one."""

    file: Path
    width_px: int
    height_px: int
    across: Literal["step", "tokens"]

    def __post_init__(self) -> None:
        if self.file.suffix.lower() not in _SUFFIXES:
            raise InvalidConfiguration(f"{self.file}: must end in {' or '.join(_SUFFIXES)}; the suffix says the format")
        if not self.file.absolute().parent.is_dir():
            raise InvalidConfiguration(f"{self.file}: its folder does not exist; make it first")
        for name, value in (("width", self.width_px), ("height", self.height_px)):
            if not _LEAST_PX <= value <= _GREATEST_PX:
                raise InvalidConfiguration(f"--{name} {value}: must be {_LEAST_PX} to {_GREATEST_PX} pixels")


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPlot:
    """The written file and what the plot shows."""

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
    """Draw a run that was read into the file; raises `InvalidConfiguration` where the file cannot be written."""
    from cairn.reports.plots.curve_plot import draw_png, draw_svg  # numpy and matplotlib: only where something is drawn

    curves = gather_curves(log)
    draw = draw_svg if request.file.suffix.lower() == ".svg" else draw_png
    image = draw(curves, width_px=request.width_px, height_px=request.height_px, across=request.across)
    replace_file(request.file, image)
    return WrittenPlot(
        run_id=curves.run_id,
        file=str(request.file),
        bytes=len(image),
        sha256=sha256(image),
        width_px=request.width_px,
        height_px=request.height_px,
        last_step=curves.last_step,
        attempts=curves.attempts,
        interruptions=dict(curves.reasons),
    )


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file atomically, so that a viewer never reads half of it."""
    temporary = path.absolute().parent / f".{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:  # its permissions follow the umask
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        missing = isinstance(error, FileNotFoundError)
        problem = "its folder does not exist; make it first" if missing else f"cannot be written: {error.strerror}"
        raise InvalidConfiguration(f"{path}: {problem}") from error
