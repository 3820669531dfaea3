"""A program that owns a run, pins its first checkpoint for an evaluation and beats until its stdin ends."""

import sys
from pathlib import Path

from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.machine.placement import this_placement
from tests.crash.live_owner import beating
from tests.entries import writer
from tests.fabricated_run import fabricate


def main(folder: str) -> None:
    """Own the run `bard` of the store in `folder`."""
    here = this_placement(device="cpu", threads=1)
    run = fabricate(LocalStore(Path(folder)), "bard")
    run.start(placement=here)
    pin_checkpoint(run.log, new_pin(run.commit(10), here, suite_sha256="s"), writer=writer())
    run.commit(20)
    with beating(run):
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
