"""Runs `docs/one_file.py` in a process that is forked once torch is imported: `… one_file_process FILE ARGUMENTS`."""

import runpy
import sys


def main() -> None:
    """Run the file as its own process would."""
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
