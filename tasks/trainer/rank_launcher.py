"""Starts and watches this machine's ranks of one trainer (`python -m cairn.tasks.trainer.rank_launcher`).

If one rank exits badly, all are ended within seconds and the parent learns which one; nothing is restarted. Rank 0
inherits this process's stdin and stdout. The ranks of one machine meet in a file that only this user can reach,
those of several in a small key-value store in the first machine's launcher.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Literal

import msgspec
import psutil

from cairn.storage.stores import child_process
from cairn.tasks.policy.failures import PEER_LOST_EXIT_CODE
from cairn.tasks.trainer import machines, trainer_group, trainer_protocol

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0
"""After one rank has failed, the time in which the others may exit by themselves."""
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class Request(msgspec.Struct, kw_only=True, frozen=True):
    """A rank's request: an `operation` on `keys`; `number` is the amount to add, or the rank that joins."""

    operation: Literal["join", "set", "get", "add", "compare_set", "check", "delete", "count"]
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    number: int = 0


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """The value of a key, or None, and a number: the result of `add` and `count`, 1 for yes elsewhere."""

    value: bytes | None = None
    number: int = 0


class RendezvousValues:
    """The values under their keys, and the ranks that joined; safe to use from several threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._joined: set[int] = set()
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Answer:
        """Execute a request at once."""
        with self._lock:
            key = request.keys[0] if request.keys else ""
            present = self._values.get(key)
            match request.operation:
                case "join":
                    is_new = request.number not in self._joined
                    self._joined.add(request.number)
                    return Answer(number=int(is_new))
                case "check":
                    return Answer(number=int(all(key in self._values for key in request.keys)))
                case "count":
                    return Answer(number=len(self._values))
                case "add":
                    total = int(present or b"0") + request.number
                    self._values[key] = str(total).encode()
                    return Answer(number=total)
                case "delete":
                    return Answer(number=int(self._values.pop(key, None) is not None))
                case "compare_set" if present != request.expected and (present is not None or request.expected):
                    return Answer(value=request.expected if present is None else present)
                case "set" | "compare_set":
                    self._values[key] = request.value
            return Answer(value=self._values.get(key))


@contextlib.contextmanager
def serving_rendezvous(address: str, secret: bytes) -> Iterator[int]:
    """Serve at HOST:PORT until the block ends, one thread for each connection; yields the port."""
    values = RendezvousValues()

    def serve(connection: socket.socket) -> None:
        ends = (machines.NotAdmitted, machines.ConnectionEnded, OSError, msgspec.MsgspecError)
        with connection, contextlib.suppress(*ends):
            peer = machines.admit(connection, secret)
            while True:
                request = msgspec.msgpack.decode(peer.receive(), type=Request)
                peer.send(msgspec.msgpack.encode(values.answer(request)))

    with machines.listening(address, serve) as port:
        yield port


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this machine's ranks to their end; if one failed, send which one to the parent and exit with 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, trainer_group.STACKS_SIGNAL):
        signal.signal(number, _forward_signal)
    parser = argparse.ArgumentParser(prog="rank_launcher")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")
    group, ranks = trainer_group.TrainerGroup(**vars(parser.parse_args(arguments))), dict[int, "Popen[bytes]"]()
    with meeting_place(group) as variables:
        for local in range(group.processes):
            rank = group.node_rank * group.processes + local
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(group.size)}
            ranks[rank] = child_process.start_child(
                trainer_group.TRAINER_COMMAND,
                stdin=child_process.DEVNULL if rank else None,
                stdout=sys.stderr.fileno() if rank else None,
                stderr=None,
                environment={**os.environ, **variables, **own},
                own_group=False,
            )
        ended = watch(ranks)
    if ended is None:
        os._exit(0)
    with contextlib.suppress(OSError):
        os.write(1, trainer_protocol.encode_message(ended))
    os._exit(1)


def watch(
    ranks: Mapping[int, "Popen[bytes]"], *, sleep: Callable[[float], None] = time.sleep
) -> trainer_protocol.RankEnded | None:
    """Wait until all ranks have ended; two seconds after the first that failed the rest are killed."""
    ends, grace = list[trainer_protocol.RankEnded](), _GRACE_SECONDS
    while len(ends) < len(ranks):
        known = {end.rank for end in ends}
        codes = {rank: process.poll() for rank, process in ranks.items() if rank not in known}
        ends += [
            trainer_protocol.RankEnded(rank=rank, exit_code=code) for rank, code in codes.items() if code is not None
        ]
        if grace <= 0:
            for process in ranks.values():
                process.kill()
                process.wait()
            break
        grace -= _POLL_SECONDS if any(end.exit_code for end in ends) else 0
        sleep(_POLL_SECONDS)
    return find_failed_rank(ends)


@contextlib.contextmanager
def meeting_place(group: trainer_group.TrainerGroup) -> Iterator[dict[str, str]]:
    """Yield the environment variables that name where the ranks meet."""
    if group.nodes == 1:
        with tempfile.TemporaryDirectory(prefix="cairn-ranks-") as folder:  # mode 0700
            loopback = _LOOPBACK.get(sys.platform, "")
            kept = {name: os.environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
            yield {
                trainer_group.RANK_STORE: str(Path(folder) / "store"),
                **{name: value for name, value in kept.items() if value},
            }
    elif group.node_rank == 0:
        with serving_rendezvous(group.rendezvous, trainer_group.rendezvous_secret(os.environ)) as port:
            os.write(1, trainer_protocol.encode_message(trainer_protocol.Listening(port=port)))
            yield {trainer_group.RENDEZVOUS: f"{group.host}:{port}"}
    else:
        yield {trainer_group.RENDEZVOUS: group.rendezvous}


def find_failed_rank(ends: Sequence[trainer_protocol.RankEnded]) -> trainer_protocol.RankEnded | None:
    """Return the end that is the cause, of those that no one here brought about: not one that only lost a peer."""
    failed = [end for end in ends if end.exit_code]
    own = [end for end in failed if end.exit_code != PEER_LOST_EXIT_CODE]
    return next(iter(own or failed), None)


def _forward_signal(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)


if __name__ == "__main__":
    main()
