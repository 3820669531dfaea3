"""A sweep beside a run that trains, killed at its first deed or anywhere in it.

Owns waiting until there is something to sweep. Half of the time the flow sleeps meanwhile, so that all the deeds are
this sweep's; else it races with the flow's own.
"""

import os
import random
import signal
import subprocess
import sys
import time

from tests.processes.waiting import prompt_seconds
from tests.programs.chaos.environment import Environment
from tests.programs.chaos.observer import RUN
from tests.programs.chaos.plan import Skipped
from tests.programs.chaos.processes import Role

_KEPT = 3
_FROZEN_SECONDS = 2.0
"""Less than the lease: nobody may take the run for lost."""
_LONGEST_SWEEP_SECONDS = 0.05


def kill_sweep(environment: Environment) -> int:
    """Do it; returns how many processes were killed."""
    chance = random.Random(f"{environment.tag} {len(environment.observer.seen)}")
    environment.halt(Role.TRAINER)  # the run would be at its end before a busy machine has loaded a sweep
    process = environment.start_process(
        [sys.executable, "-m", "tests.programs.chaos.waiting_sweep", RUN, environment.url]
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        environment.wake()
        if not _waits_for_work(environment):
            raise Skipped("nothing to sweep")
        frozen = environment.processes.send_signal(signal.SIGSTOP, Role.FLOW) if chance.random() < 0.5 else []
        before = environment.observer.newest_seq()
        process.stdin.write(b"\n")
        process.stdin.flush()
        if frozen:
            _wait_for_deed(environment, process, before)
        time.sleep(chance.uniform(0.0, _LONGEST_SWEEP_SECONDS))
        is_alive = process.poll() is None
        process.kill()
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        return int(is_alive)
    finally:
        process.kill()
        process.communicate()


def _waits_for_work(environment: Environment) -> bool:
    """Wait until a commit makes more checkpoints readable than are kept: the flow's own sweep comes next."""
    deadline, newest = time.monotonic() + prompt_seconds(), environment.observer.state().newest_committed
    while time.monotonic() < deadline and environment.processes.of(Role.FLOW):
        state = environment.observer.state()
        if len(state.readable) > _KEPT and state.newest_committed != newest:
            return True
        time.sleep(0.002)
    return False


def _wait_for_deed(environment: Environment, process: "subprocess.Popen[bytes]", before: int) -> None:
    deadline = time.monotonic() + _FROZEN_SECONDS
    while process.poll() is None and environment.observer.newest_seq() == before and time.monotonic() < deadline:
        time.sleep(0.002)
