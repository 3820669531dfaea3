"""One process that trains a tiny run in legs on changing numbers of processes (`python -m tests.model.rank_legs`).

Arguments: its rank, the port of the test's store, and the legs as JSON. The state goes from leg to leg in a file.
`train_legs` starts such processes; rank 0 leaves what it saw of each leg beside the leg's file.
"""

import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.model.training.determinism import make_deterministic
from cairn.model.training.parallel import SINGLE_RANK, join_ranks
from cairn.model.training.training_loop import Probe
from tests.model.tiny_run import CPU, TinyRun
from tests.networks.own_files import nanogpt
from tests.processes.fork_server import fork_server


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Some steps of a run by so many processes, from the state in one file to the state in another.

    `slow_rank` takes half a second longer for each forward pass.
    """

    size: int
    until_step: int
    settings: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    begin: str = ""
    end: str = ""
    slow_rank: int | None = None


OPERATIONS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
}
"""Collective calls of PyTorch, the last of them a sharded tensor's own."""


class Exchanges(TorchDispatchMode):
    """Counts collective calls and the bytes of their whole tensors; those of sharding by number format too."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.tensor import DTensor  # takes a second, which every worker's collection would spend

        self._sharded = DTensor
        self.bytes: Counter[str] = Counter()
        self.operations: dict[str, list[int]] = {}

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if any(issubclass(kind, self._sharded) for kind in types):
            return NotImplemented  # it comes back with the tensors that it is made of
        name = call.overloadpacket.__name__
        if call.namespace in ("c10d", "_c10d_functional") and name in OPERATIONS:
            tensors = (each for each in torch.utils._pytree.tree_leaves(given) if isinstance(each, torch.Tensor))
            counted = self.operations.setdefault(OPERATIONS[name], [0, 0])
            counted[0], counted[1] = counted[0] + 1, counted[1] + max(each.nbytes for each in tensors)
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            whole = given[0] if name == "_allgather_base_" else given[1]
            self.bytes[f"{name.strip('_')} {str(whole.dtype).removeprefix('torch.')}"] += whole.nbytes
        return call(*given, **(named or {}))


def train_legs(legs: list[Leg], *, processes: int) -> None:
    """Train the legs by so many processes, which are all there from the first leg on."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-m", "tests.model.rank_legs"]
    told = json.dumps([asdict(leg) for leg in legs])
    ranks = [fork_server().popen([*words, str(rank), str(store.port), told]) for rank in range(processes)]
    assert [process.wait() for process in ranks] == [0] * processes


def read_seen(path: Path) -> dict[str, Any]:
    """Return what rank 0 saw of the leg with this file: records, bytes exchanged in its last step, probe."""
    seen: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return seen


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in a file of a leg."""
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def probe(run: TinyRun) -> tuple[float, str | None]:
    """Measure as the trainer does."""
    rhythm = run.training.model_copy(update={"probe_every_steps": 1, "probe_batches": 2, "sample_tokens": 4})
    own = Probe(windows=run.windows, training=rhythm, prompt_ids=[1], decode=str)
    return own.measure(run.state.model)


def _train(leg: Leg, rank: int, store: Any) -> None:
    mode = leg.settings.get("parallel", "ddp")
    ranks = SINGLE_RANK if leg.size == 1 else join_ranks(rank, leg.size, mode=mode, device=CPU, store=store)
    run = TinyRun(model=leg.model, ranks=ranks, files=nanogpt() if "module" in leg.model else None, **leg.settings)
    if rank == leg.slow_rank:
        run.state.model.ln_f.register_forward_hook(lambda *given: time.sleep(0.5))
    if leg.begin:
        run.state.load(read_state(Path(leg.begin)))
    ticks = itertools.count()
    records = run.train(leg.until_step - 1, clock=lambda: float(next(ticks)))
    exchanges = Exchanges()
    with contextlib.nullcontext() if run.training.compile else exchanges:  # a compiler does not compile below it
        stop = partial(ranks.any, False)  # as the trainer asks
        records += run.train(leg.until_step, clock=lambda: float(next(ticks)), stop=stop)
    tensors, measured = run.tensors(), probe(run) if ranks.is_sharded else None  # collective calls
    if rank == 0:
        with Path(leg.end).open("wb") as file:
            np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
        seen = {"records": [asdict(record) for record in records], "exchanged": exchanges.bytes, "probe": measured}
        seen["operations"] = exchanges.operations
        Path(leg.end).with_suffix(".json").write_text(json.dumps(seen))
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
