"""Starts and watches the ranks of one trainer by torchrun's agent (`python -m tasks.trainer.rank_launcher`).

If one rank exits badly, all are ended within seconds and the parent learns which rank it was; nothing is restarted.
Rank 0 inherits this process's stdin and stdout.
Source: `torch.distributed.run` and its `elastic_launch`.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from tasks.machine.background_thread import running_beside
from tasks.policy.failures import PEER_LOST_EXIT_CODE
from tasks.trainer.parent_watch import watch_parent
from tasks.trainer.trainer_group import TrainerGroup
from tasks.trainer.trainer_protocol import RankEnded, encode_message

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 2.0
"""After one rank has exited, the time in which the others may exit by themselves."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this machine's ranks to their end; if one failed, send which one to the parent and exit with 1."""
    watch_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _forward_signal)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the last lines of stderr are evidence, not advice
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own; otherwise torchrun warns
    parser = argparse.ArgumentParser(prog="rank_launcher")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")
    ended = run_ranks(TrainerGroup(**vars(parser.parse_args(arguments))))
    if ended is None:
        os._exit(0)
    with contextlib.suppress(OSError):
        os.write(1, encode_message(ended))
    os._exit(1)


def run_ranks(group: TrainerGroup) -> RankEnded | None:
    """Start this node's ranks and wait for all of them; return the rank that failed first, or None."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    rendezvous = (
        {"rdzv_backend": "static", "rdzv_endpoint": group.rendezvous, "rdzv_configs": {"rank": group.node_rank}}
        if group.nodes > 1
        else {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    )
    config = LaunchConfig(
        min_nodes=group.nodes,
        max_nodes=group.nodes,
        nproc_per_node=group.processes,
        run_id="cairn",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",
        rdzv_timeout=900,
        local_addr="localhost" if group.nodes == 1 else None,
        **rendezvous,
    )
    killed = set[int]()
    try:
        with running_beside(partial(_kill_survivors, killed), name="ranks"):
            elastic_launch(config, sys.executable)("-m", "tasks.trainer.trainer")
    except ChildFailedError as failed:
        return find_failed_rank(failed.failures, killed)
    return None


def find_failed_rank(failures: Mapping[int, "ProcessFailure"], killed: Collection[int]) -> RankEnded:
    """Return the rank whose exit is the cause: not one that only lost a peer, nor a pid in `killed`.

    `failures` are by rank, in the order they were seen.
    """
    ends = [(rank, failure) for rank, failure in failures.items() if failure.pid not in killed]
    own = [(rank, failure) for rank, failure in ends if failure.exitcode != PEER_LOST_EXIT_CODE]
    rank, failure = next(iter(own or ends or failures.items()))
    return RankEnded(rank=rank, exit_code=failure.exitcode)


def _kill_survivors(killed: set[int], stop: threading.Event) -> None:
    """Kill the ranks that still run 2 s after one exited, and add them to `killed`: torchrun would wait much longer."""
    seen = set[int]()
    while not stop.wait(_POLL_SECONDS):
        alive = {child.pid: child for child in psutil.Process().children() if _is_running(child)}
        seen |= alive.keys()
        if seen - alive.keys() and alive:
            stop.wait(_GRACE_SECONDS)
            for child in alive.values():
                killed.add(child.pid)
                with contextlib.suppress(psutil.Error):
                    child.kill()


def _is_running(child: psutil.Process) -> bool:
    try:
        return bool(child.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _forward_signal(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)


if __name__ == "__main__":
    main()
