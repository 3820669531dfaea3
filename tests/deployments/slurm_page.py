"""The lines that the page on Slurm shows."""

import re
from pathlib import Path


def page_lines(root: Path) -> str:
    """The lines of the page for a batch script, from the command on."""
    shown = re.findall(r"^    (.*)$", (root / "docs" / "how-to" / "slurm.md").read_text(encoding="utf-8"), re.MULTILINE)
    first = next(number for number, line in enumerate(shown) if line.startswith("srun"))
    return "\n".join(shown[first : first + 3])
