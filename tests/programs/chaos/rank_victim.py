"""A rank that kills itself at places of a step, in the place of the launcher's own ranks.

The variable `KILLS` lists them as RANK:PLACE:COUNT, the rank it began as, and how often it has come there by then.
Before it dies, it leaves the moment in the folder that `MOMENTS` names.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cairn.model.training import parallel, training_step
from cairn.model.training.train_state import TrainState
from cairn.storage.stores.child_process import child_command
from cairn.tasks.trainer import rank_store, staging, trainer, trainer_group

KILLS, MOMENTS, STEP_SECONDS = "CAIRN_TEST_KILLS", "CAIRN_TEST_MOMENTS", "CAIRN_TEST_STEP_SECONDS"
SUSPENDED, MACHINE = "suspend-", "machine-"
"""Before a place: the rank hangs there instead; its launcher is killed, and so all ranks of its machine."""
PLACES: dict[str, tuple[Any, str]] = {
    "forward": (training_step, "mean_loss"),
    "backward": (training_step, "_backward"),
    "flags": (dist, "all_reduce"),
    "parts": (dist, "all_to_all_single"),
    "whole": (dist, "all_gather_single"),
    "losses": (parallel.Ranks, "gather_losses"),
    "clip": (training_step, "_clip"),
    "update": (training_step, "_update"),
    "copy": (staging.Staging, "copy"),
    "stage": (staging, "stage_share"),
    "publish": (staging.SharedStaging, "publish_shards"),
    "hand-over": (parallel.Ranks, "hand_over"),
    "meet": (rank_store.Meetings, "exchange"),
    "connect": (parallel, "_connect"),
}
"""Where a rank can die: before each of these calls, and after it (`after-`)."""
NAMES = tuple(f"{when}{place}" for place in PLACES for when in ("", "after-"))


class Executioner:
    """Counts how often this rank comes to a place, and ends it there."""

    def __init__(self, place: str, kills: dict[str, int]) -> None:
        self.place, self.kills, self.counts = place, kills, dict[str, int]()

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call with what happens before and after it."""

        def watched(*given: Any, **named: Any) -> Any:
            self.come(self.place)
            result = call(*given, **named)
            self.come(f"after-{self.place}")
            return result

        return watched

    def come(self, name: str) -> None:
        """Die if this is the time."""
        self.counts[name] = self.counts.get(name, 0) + 1
        for prefix, number in (("", signal.SIGKILL), (SUSPENDED, signal.SIGSTOP), (MACHINE, signal.SIGKILL)):
            if self.kills.get(f"{prefix}{name}") == self.counts[name]:
                moment = Path(os.environ[MOMENTS]) / f"{os.environ['RANK']}-{os.getpid()}"
                moment.write_text(f"{time.monotonic()} {prefix}{name}")
                os.kill(os.getppid() if prefix == MACHINE else os.getpid(), number)
                if prefix == MACHINE:
                    time.sleep(60.0)  # the kernel ends it with its launcher


def main() -> None:
    """Train as a rank does, until it is time."""
    kills = [kill.split(":") for kill in os.environ.get(KILLS, "").split(",") if kill]
    own = {place: int(count) for rank, place, count in kills if rank == os.environ.get("RANK")}
    seconds, update = float(os.environ.get(STEP_SECONDS, "0")), training_step._update
    if seconds and os.environ.get("RANK") == "0":  # so that others have time to join

        def slow_update(state: TrainState) -> None:
            time.sleep(seconds)
            update(state)

        training_step._update = slow_update
    for place, (owner, name) in PLACES.items():
        if any(kill.endswith(place) for kill in own):
            setattr(owner, name, Executioner(place, own).wrap(getattr(owner, name)))
    trainer.main()


def launch() -> None:
    """Launch ranks that are victims."""
    trainer_group.TRAINER_COMMAND = child_command("tests.programs.chaos.rank_victim")
    trainer_group.main()


if __name__ == "__main__":
    sys.exit(main())
