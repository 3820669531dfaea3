"""Detects that a person cancels this run: in Prefect by polling, in Slurm by asking once SIGTERM has come.

Prefect sends no signal without a worker, and Slurm sends the same one before a preemption, a requeue and a time limit
(`scontrol show job` of Slurm 22.05, observed after each of the four).
"""

import math
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from prefect.client.orchestration import get_client

from cairn.flows.orchestrator.flow_run import FlowRun
from cairn.flows.orchestrator.prefect_server import is_ephemeral_server
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal

_POLL_SECONDS = 3.0


class CancellationWatch:
    """Polls the state of one flow run, once there is one, in its own thread."""

    def __init__(self, flow_run: FlowRun, shutdown: ShutdownSignal) -> None:
        # A person cannot reach the temporary server of a command.
        self._flow_run = FlowRun() if is_ephemeral_server(os.environ) else flow_run
        self._shutdown = shutdown
        self._poll_now, self._answered = threading.Event(), threading.Event()
        self._stop = self._cancelling = False
        self._cancelled_in_slurm: bool | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Poll every few seconds while the block runs; a cancellation requests the shutdown."""
        if not self._flow_run.is_expected:
            yield
            return
        threading.Thread(target=self._poll, name="cancellation", daemon=True).start()
        try:
            yield
        finally:
            self._stop = True
            self._poll_now.set()

    def is_cancelling(self) -> bool:
        """Return whether it is cancelled; after a shutdown request it asks first, and a slow answer counts as no."""
        if self._flow_run.id is not None and self._shutdown.signal and not self._cancelling and not self._stop:
            self._answered.clear()
            self._poll_now.set()
            self._answered.wait(_POLL_SECONDS)
        if not self._cancelling and self._cancelled_in_slurm is None and self._shutdown.signal == "SIGTERM":
            self._cancelled_in_slurm = is_cancelled_in_slurm(os.environ)
        return self._cancelling or bool(self._cancelled_in_slurm)

    @property
    def where(self) -> str:
        """Where a person cancelled it."""
        return "Slurm" if self._cancelled_in_slurm else "Prefect"

    def _poll(self) -> None:
        if (flow_run_id := self._flow_run.wait_id()) is None:
            return
        with suppress(Exception), get_client(sync_client=True) as client:  # whatever the API does, training goes on
            while not self._stop and not self._cancelling:
                self._poll_now.clear()
                with suppress(Exception):  # an API that does not answer is no cancellation
                    state = client.read_flow_run(flow_run_id).state
                    self._cancelling = state is not None and (state.is_cancelling() or state.is_cancelled())
                self._answered.set()
                if self._cancelling:
                    self._shutdown.request("cancelled in Prefect", "a person cancelled it in Prefect")
                    return
                self._poll_now.wait(_POLL_SECONDS)


def is_cancelled_in_slurm(environment: Mapping[str, str]) -> bool:
    """Whether this process belongs to a job that was ended by `scancel`; False if Slurm does not answer."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return False
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return is_cancelled(shown)


def is_cancelled(shown: str) -> bool:
    """Whether `scontrol show job` describes a job that `scancel` ended."""
    # While it ends, it is only COMPLETING; but it was not preempted, has run (a job that is queued again has not, by
    # its new start) and is not out of time.
    words = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    state = words.get("JobState", "")
    if state.startswith("CANCELLED"):
        return True
    if state != "COMPLETING" or words.get("PreemptTime", "None") != "None":
        return False
    return 0 < _seconds(words.get("RunTime", "")) < (_seconds(words.get("TimeLimit", "")) or math.inf)


def _seconds(duration: str) -> int:
    """Return the seconds of [days-]hours:minutes:seconds, 0 for anything else, such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", duration)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
