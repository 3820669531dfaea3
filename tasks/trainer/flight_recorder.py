"""Writes a rank's newest collective calls to stderr at a signal: torch's flight recorder, of NCCL and of gloo.

Source: PyTorch's tutorial "Flight Recorder for Debugging Stuck Jobs".
"""

import os
import signal
import socket
import sys
import threading

import msgspec
import torch
import torch.distributed as dist

_BUFFER, _CALLS = "TORCH_FR_BUFFER_SIZE", "200"
_SHOWN_CALLS = 3


class _Call(msgspec.Struct):
    profiling_name: str
    input_sizes: list[list[int]]
    state: str


class _Progress(msgspec.Struct):
    last_enqueued_collective: str
    last_completed_collective: str


class _Recorded(msgspec.Struct):
    entries: list[_Call] = []
    pg_status: dict[str, _Progress] = {}


def write_collectives_at(number: signal.Signals) -> None:
    """Write them whenever the signal comes, also while the main thread waits; it comes before a process group is made.

    The interpreter runs no handler while the main thread waits in a collective, but passes the signal to a socket.
    """
    os.environ.setdefault(_BUFFER, _CALLS)
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    signal.signal(number, lambda *_: None)

    def write() -> None:
        with wakeup, signals:
            while received := signals.recv(1):
                if received[0] == number and dist.is_initialized():
                    print("\n".join(newest_collectives()), file=sys.stderr, flush=True)

    threading.Thread(target=write, name="collectives", daemon=True).start()


def newest_collectives() -> list[str]:
    """Return how far this rank is in each process group, and its newest calls; nothing where torch has no recorder."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    try:
        recorded = msgspec.json.decode(dump(True, False), type=_Recorded) if dump else _Recorded()
    except msgspec.DecodeError as error:
        return [f"torch's flight recorder cannot be read: {error}"]
    return [
        *(
            f"process group {group}: collective {status.last_enqueued_collective} was called, "
            f"{status.last_completed_collective} completed"
            for group, status in recorded.pg_status.items()
        ),
        *(f"  {call.profiling_name} {call.input_sizes} {call.state}" for call in recorded.entries[-_SHOWN_CALLS:]),
    ]
