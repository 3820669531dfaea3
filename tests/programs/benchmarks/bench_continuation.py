"""From a receipt to the next attempt's claim, in a deployed run with a worker standing by.

`make up` on a free port, one run, and two ways to end an attempt, in turns: SIGTERM to the flow run's process (a
preemption: from the receipt to the next claim) and SIGKILL (from the kill to the next claim; the log has no receipt,
and the claim waits until the dead process has been silent for long enough). Times are those of the log's entries, or of
this machine's clock at the kill. The medians are printed, with the machine's load.
"""

import argparse
import os
import signal
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from cairn.storage.logs.run_state import AttemptRecord
from tests.deployments.started_up import StartedUp
from tests.processes.waiting import wait_until
from tests.session_folder import close_session, open_session

RUN = "bench"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="how often each way is measured")
    options = parser.parse_args()
    open_session()
    with tempfile.TemporaryDirectory() as folder:
        up = StartedUp(Path(folder))
        try:
            seconds = measured(up, options.times)
        finally:
            up.stop(signal.SIGTERM)
            close_session()
    for way, values in seconds.items():
        shown = " ".join(f"{value:.1f}" for value in values)
        print(f"{way:34} median {statistics.median(values):5.1f} s   ({shown})")
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


def measured(up: StartedUp, times: int) -> dict[str, list[float]]:
    """Start the run and end its attempts one after the other; returns the seconds of each way."""
    endless = ("-p", f"config={up.config}", "-p", 'overrides=["training.steps=1000000"]')
    asked = up.prefect("deployment", "run", "train-gpt/train-gpt", *endless, "-p", f"run_id={RUN}")
    if asked.returncode:
        raise SystemExit(asked.stdout + asked.stderr)
    seconds: dict[str, list[float]] = {"SIGTERM: receipt to claim": [], "SIGKILL: kill to claim": []}
    for number in range(2 * times):
        way, values = list(seconds.items())[number % 2]
        values.append(continued_after(up, number + 1, is_preempted=number % 2 == 0))
        print(f"{way}: {values[-1]:.1f} s", flush=True)
    return seconds


def continued_after(up: StartedUp, attempt: int, *, is_preempted: bool) -> float:
    """End the attempt; returns the seconds from its end to the next claim."""
    pid = training(up, attempt).started.placement.pid
    ended = datetime.now(UTC)
    os.kill(pid, signal.SIGTERM if is_preempted else signal.SIGKILL)
    wait_until(lambda: len(up.state(RUN).attempts) > attempt, "the next claim", up.output)
    state = up.state(RUN)
    receipt = state.attempt(attempt).ended_at
    assert receipt is not None
    return (state.attempt(attempt + 1).started_at - (receipt if is_preempted else ended)).total_seconds()


def training(up: StartedUp, attempt: int) -> AttemptRecord:
    """Return the attempt once it has committed."""

    def has_committed() -> bool:
        attempts = up.state(RUN).attempts
        return len(attempts) >= attempt and attempts[attempt - 1].last_committed_step is not None

    wait_until(has_committed, f"a commit of attempt {attempt}", up.output)
    return up.state(RUN).attempts[attempt - 1]


if __name__ == "__main__":
    main()
