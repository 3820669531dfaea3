"""The scripts (completions/) that let bash, zsh and fish ask `cairn` what Tab can add, and where the shells look."""

from pathlib import Path
from typing import Literal

Shell = Literal["bash", "zsh", "fish"]


def read_script(shell: Shell) -> str:
    """Return the script of a shell."""
    return (Path(__file__).parent / "completions" / f"cairn.{shell}").read_text(encoding="utf-8")


def install_script(shell: Shell) -> Path:
    """Put the script where the shell looks, and a line into its start-up file; returns where; raises OSError."""
    from cyclopts.completion.install import add_to_rc_file, get_default_completion_path

    path = get_default_completion_path(shell, "cairn").absolute()
    path.write_text(read_script(shell), encoding="utf-8")
    if shell != "fish":
        add_to_rc_file(path, "cairn", shell)
    return path
