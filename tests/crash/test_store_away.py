"""A store that is away for a while: training goes on, nothing is lost or doubled, the bits are those of a quiet run."""

import subprocess
import time
from collections.abc import Callable

import pytest

from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds, wait_for
from tests.s3.fault_proxy import FaultProxy, NetworkFault

AWAY_SECONDS = 5.0


def send_away_when(
    proxy: FaultProxy, process: "subprocess.Popen[bytes]", pattern: str, output: Callable[[], str]
) -> None:
    """Let every request fail for some seconds, from the first that names `pattern`."""
    wait_for(lambda: any(pattern in request for request in proxy.requests), process, pattern, output)
    proxy.aim(NetworkFault.SLOW_DOWN, ".", times=1_000_000)
    time.sleep(AWAY_SECONDS)  # the outage itself
    proxy.aims.clear()


@pytest.mark.slow
def test_uploads_that_are_refused_for_a_while_cost_no_attempt_and_no_bit(
    remote: Command, proxy: FaultProxy, undisturbed_sha256: str
) -> None:
    refused = proxy.aim(NetworkFault.SLOW_DOWN, "PUT .*weights-", nth=3, times=10)
    remote.train()
    assert refused.seen > 12, "the fault must have struck"
    assert len(remote.state().attempts) == 1
    assert remote.state_sha256() == undisturbed_sha256
    assert "has waited" in remote.output()


@pytest.mark.slow  # quick witnesses: `tests/s3/test_network_faults.py`, and the store-away of the campaign
def test_a_store_that_is_away_altogether_costs_no_attempt_and_no_bit(
    remote: Command, proxy: FaultProxy, undisturbed_sha256: str
) -> None:
    process = remote.start()
    send_away_when(proxy, process, "step-00000010-attempt-0001/manifest.json", remote.output)
    assert process.wait(timeout=patience_seconds()) == 0, remote.output()
    assert len(remote.state().attempts) == 1
    assert remote.state_sha256() == undisturbed_sha256


@pytest.mark.slow
def test_a_store_that_is_away_longer_than_the_runs_patience_is_continued_later_with_the_same_bits(
    remote: Command, proxy: FaultProxy, undisturbed_sha256: str
) -> None:
    process = remote.start("--set", "checkpoint.patience_seconds=1")
    wait_for(lambda: any("step-00000010-" in request for request in proxy.requests), process, "step 10", remote.output)
    proxy.aim(NetworkFault.SLOW_DOWN, ".", times=1_000_000)
    assert process.wait(timeout=patience_seconds()) != 0
    proxy.aims.clear()
    remote.train()
    state = remote.state()
    assert [attempt.ended is not None for attempt in state.attempts] == [True] * len(state.attempts)
    assert remote.state_sha256() == undisturbed_sha256
