"""A sweep that is loaded already and waits for a line on its standard input, so that the campaign can aim it.

Run as `python -m tests.programs.chaos.waiting_sweep RUN STORE`; does what `cairn sweep RUN --store STORE` does.
"""

import sys

from cairn.flows.operations.store_sweep import sweep_run_by_id
from cairn.storage.stores.open_store import open_store


def main(run_id: str, url: str) -> None:
    """Say that it is loaded, wait, sweep."""
    store = open_store(url)
    print("loaded", flush=True)
    sys.stdin.readline()
    sweep_run_by_id(store, run_id, dry_run=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
