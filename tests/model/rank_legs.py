"""One process that trains a tiny run in legs on changing numbers of processes (`python -m tests.model.rank_legs`).

Arguments: its rank, the port of the test's store, and the legs as JSON. The state goes from leg to leg in a file.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from model.training.determinism import make_deterministic
from model.training.parallel import SINGLE_RANK, join_ranks
from tests.model.tiny_run import CPU, TinyRun


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Some steps of a run by so many processes, from the state in one file to the state in another."""

    size: int
    until_step: int
    settings: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    begin: str = ""
    end: str = ""


def encode_legs(legs: list[Leg]) -> str:
    """Return the legs as an argument."""
    return json.dumps([asdict(leg) for leg in legs])


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in a file of a leg."""
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _train(leg: Leg, rank: int, store: Any) -> None:
    mode = leg.settings.get("parallel", "ddp")
    ranks = SINGLE_RANK if leg.size == 1 else join_ranks(rank, leg.size, mode=mode, device=CPU, store=store)
    run = TinyRun(model=leg.model, ranks=ranks, **leg.settings)
    if leg.begin:
        run.state.load(read_state(Path(leg.begin)))
    run.train(leg.until_step)
    tensors = run.tensors()  # a collective call
    if rank == 0:
        with Path(leg.end).open("wb") as file:
            np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
    if leg.size > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Train this rank's part of every leg."""
    rank, port, legs = int(sys.argv[1]), int(sys.argv[2]), [Leg(**leg) for leg in json.loads(sys.argv[3])]
    make_deterministic(seed=1, threads=1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for number, leg in enumerate(legs):
        if rank < leg.size:
            _train(leg, rank, dist.PrefixStore(f"leg-{number}", store))
        if rank == 0:
            store.set(f"done-{number}", "")
        store.wait([f"done-{number}"])


if __name__ == "__main__":
    main()
