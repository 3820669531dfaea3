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
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from tasks.policy.failures import PEER_LOST_EXIT_CODE
from tasks.trainer.parent_watch import watch_parent
from tasks.trainer.trainer_group import TrainerGroup
from tasks.trainer.trainer_protocol import RankEnded, encode_message

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 2.0
"""After one rank has exited, the time in which the others may exit by themselves."""
_RENDEZVOUS_SECONDS = 900


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this machine's ranks to their end; if one failed, send which one to the parent and exit with 1."""
    watch_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _SIGNALS:
        signal.signal(number, _forward_signal)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the last lines of stderr are evidence, not advice
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own; otherwise torchrun warns
    ended = run_ranks(_parse_group(arguments))
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
        rdzv_timeout=_RENDEZVOUS_SECONDS,
        local_addr="localhost" if group.nodes == 1 else None,
        **rendezvous,
    )
    killed = set[int]()
    try:
        with _killing_survivors(killed):
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


@contextlib.contextmanager
def _killing_survivors(killed: set[int]) -> Iterator[None]:
    """Kill the ranks that still run 2 s after one exited: torchrun would wait much longer."""
    over = threading.Event()

    def poll() -> None:
        seen = set[int]()
        while not over.wait(_POLL_SECONDS):
            alive = {child.pid: child for child in psutil.Process().children() if _is_running(child)}
            seen |= alive.keys()
            if seen - alive.keys() and alive:
                over.wait(_GRACE_SECONDS)
                for child in alive.values():
                    killed.add(child.pid)
                    with contextlib.suppress(psutil.Error):
                        child.kill()

    thread = threading.Thread(target=poll, name="ranks", daemon=True)
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


def _forward_signal(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)


def _parse_group(arguments: Sequence[str] | None) -> TrainerGroup:
    parser = argparse.ArgumentParser(prog="rank_launcher")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")
    return TrainerGroup(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
