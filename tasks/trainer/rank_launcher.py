"""The processes of one trainer, started and watched by torchrun's agent: `python -m tasks.trainer.rank_launcher`.

Owns that the death of one ends all within seconds, that the parent hears which rank it was and how it ended, and that
none outlives this process, nor this one its parent. It never starts one again: that is an attempt's business.
Refuses to know the order; rank 0 reads it from the very stdin this process was given.
Source: `torch.distributed.run` and its `elastic_launch`.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from tasks.policy.failures import PEER_LOST_EXIT_CODE
from tasks.trainer.rank_lifetime import watch_parent
from tasks.trainer.trainer_group import TrainerGroup
from tasks.trainer.trainer_protocol import RankEnded, encode_message

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_SECONDS = 0.2
_ALONE_SECONDS = 2.0
"""How long the others may take to leave by themselves once one rank has ended badly or early."""
_MEETING_SECONDS = 900


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one trainer's processes to their end, and say which one ended it if that was not well: then leave with 1."""
    watch_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _NOTICES:
        signal.signal(number, _pass_on)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the last lines of stderr are evidence, not advice
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own number; else torchrun warns
    ended = run_ranks(_group(arguments))
    if ended is None:
        os._exit(0)
    with contextlib.suppress(OSError):
        os.write(1, encode_message(ended))
    os._exit(1)


def run_ranks(group: TrainerGroup) -> RankEnded | None:
    """Start this node's ranks and wait for all of them; returns the one that ended it, None if all ended well."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting = (
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
        rdzv_timeout=_MEETING_SECONDS,
        local_addr="localhost" if group.nodes == 1 else None,
        **meeting,
    )
    killed = set[int]()
    try:
        with _none_left_behind(killed):
            elastic_launch(config, sys.executable)("-m", "tasks.trainer.trainer")
    except ChildFailedError as failed:
        return first_ended(failed.failures, killed)
    return None


def first_ended(failures: Mapping[int, "ProcessFailure"], killed: Collection[int]) -> RankEnded:
    """Return the rank whose end is the reason: not of those that fell with it, nor of the pids that were killed then.

    `failures` by rank, in the order they were seen.
    """
    ends = [(rank, failure) for rank, failure in failures.items() if failure.pid not in killed]
    own = [(rank, failure) for rank, failure in ends if failure.exitcode != PEER_LOST_EXIT_CODE]
    rank, failure = next(iter(own or ends or failures.items()))
    return RankEnded(rank=rank, exit_code=failure.exitcode)


@contextlib.contextmanager
def _none_left_behind(killed: set[int]) -> Iterator[None]:
    """Kill the ranks that are still there a moment after one ended: torchrun would wait for them far longer."""
    over = threading.Event()

    def look() -> None:
        seen = set[int]()
        while not over.wait(_LOOK_SECONDS):
            alive = {child.pid: child for child in psutil.Process().children() if _is_running(child)}
            seen |= alive.keys()
            if seen - alive.keys() and alive:
                over.wait(_ALONE_SECONDS)
                for child in alive.values():
                    killed.add(child.pid)
                    with contextlib.suppress(psutil.Error):
                        child.kill()

    thread = threading.Thread(target=look, name="ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_running(child: psutil.Process) -> bool:
    try:
        return bool(child.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _pass_on(number: int, frame: FrameType | None) -> None:
    """A notice to this process is one to every rank."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)


def _group(arguments: Sequence[str] | None) -> TrainerGroup:
    parser = argparse.ArgumentParser(prog="rank_launcher")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")
    return TrainerGroup(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
