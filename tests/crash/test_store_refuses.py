"""A store that refuses in the middle of a run, or is away for a while: the run goes on, and ends with the same bits."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.storage.logs.run_state import CheckpointState
from tests.crash.training_command import RUN, Command
from tests.processes.waiting import patience_seconds, wait_for
from tests.s3.fault_proxy import FaultProxy, NetworkFault

FOR_EVER = 1_000_000
SHARDS_AT_ONCE = 4
RESUMABLE = 75


def assert_goes_on(remote: Command, proxy: FaultProxy, undisturbed_sha256: str) -> None:
    """Once the store refuses nothing more, the same command ends with the bits of the run nobody touched."""
    proxy.aims.clear()
    remote.train()
    assert remote.state_sha256() == undisturbed_sha256


@pytest.mark.slow  # quick witnesses: tests/tasks/policy/test_error_kind.py and test_staging_buffer.py
def test_a_permission_revoked_during_staging_ends_the_attempt_with_a_receipt_and_the_run_goes_on_once_it_is_back(
    remote: Command, proxy: FaultProxy, undisturbed_sha256: str
) -> None:
    refused = proxy.aim(NetworkFault.REFUSED, "PUT .*step-00000010-.*weights-", times=FOR_EVER)
    remote.train(exit_code=RESUMABLE)
    ended = remote.receipts()[-1]
    assert (ended.reason, ended.decision.action, ended.decision.charged) == ("storage", "stop", None)
    assert "weights-" in ended.detail and "allow these credentials" in ended.detail
    assert "the same command continues" in remote.output()
    assert 1 <= refused.seen <= SHARDS_AT_ONCE
    assert_goes_on(remote, proxy, undisturbed_sha256)


@pytest.mark.slow
def test_a_token_that_expires_during_staging_stops_the_run_and_a_new_one_continues_it(
    remote: Command, proxy: FaultProxy, undisturbed_sha256: str
) -> None:
    process = remote.start()
    wait_for(lambda: any("step-00000010-" in request for request in proxy.requests), process, "step 10", remote.output)
    expired = proxy.aim(NetworkFault.EXPIRED, ".", times=FOR_EVER)
    entries = proxy.aim(NetworkFault.EXPIRED, f"PUT .*/{RUN}/log/", times=FOR_EVER)
    proxy.aims.reverse()  # the entries are counted first
    assert process.wait(timeout=patience_seconds()) == RESUMABLE, remote.output()
    assert "renew them and run the same command again" in remote.output()
    assert expired.fired and entries.seen <= 3
    assert_goes_on(remote, proxy, undisturbed_sha256)


@pytest.mark.slow
def test_a_log_that_may_no_longer_be_written_is_asked_a_few_times_and_not_for_minutes(
    remote: Command, proxy: FaultProxy, undisturbed_sha256: str
) -> None:
    entries = proxy.aim(NetworkFault.REFUSED, f"PUT .*/{RUN}/log/", nth=4, times=FOR_EVER)
    remote.train(exit_code=RESUMABLE)
    assert 4 <= entries.seen <= 8
    assert remote.state().open_attempt is not None, "its receipt was refused too"
    assert_goes_on(remote, proxy, undisturbed_sha256)
    assert remote.reasons() == ["lost", "completed"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [NetworkFault.QUOTA, NetworkFault.STORAGE_FULL])
def test_a_bucket_that_is_full_ends_the_run_as_storage_and_it_goes_on_once_there_is_room(
    remote: Command, proxy: FaultProxy, undisturbed_sha256: str, fault: NetworkFault
) -> None:
    proxy.aim(fault, "(PUT|POST) .*step-00000010-.*weights-", times=FOR_EVER)
    remote.train("--set", "checkpoint.patience_seconds=5", exit_code=RESUMABLE)
    ended = remote.receipts()[-1]
    assert (ended.reason, ended.decision.charged) == ("storage", None), remote.output()
    assert "the store or its quota is full; free space" in remote.output()
    assert_goes_on(remote, proxy, undisturbed_sha256)


@pytest.mark.slow
def test_a_bucket_that_refuses_deletes_is_named_at_the_end_and_a_sweep_frees_it_once_it_may(
    remote: Command, proxy: FaultProxy, undisturbed_sha256: str
) -> None:
    proxy.aim(NetworkFault.REFUSED, r"(DELETE|POST .*[?&]delete)", times=FOR_EVER)
    remote.train(exit_code=1)
    sweep = f"`cairn sweep {RUN} --store {remote.store.url}` frees it once it may"
    assert "AccessDenied" in remote.output() and sweep in remote.output()
    assert remote.state_sha256() == undisturbed_sha256
    kept = {record.state for record in remote.state().checkpoints if not record.is_kept}
    assert kept == {CheckpointState.SUPERSEDED}
    proxy.aims.clear()
    assert remote.start_verb("sweep", RUN).wait(timeout=patience_seconds()) == 0
    assert {record.state for record in remote.state().checkpoints if not record.is_kept} == {CheckpointState.DELETED}


BOUND_BY_MODES = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")
"""Without these capabilities the modes of files bind root too."""


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="modes bind nobody who is root")
def test_a_folder_that_may_no_longer_be_written_stops_the_run_and_it_goes_on_once_it_may(
    tmp_path: Path, api_url: str, undisturbed_sha256: str
) -> None:
    command = Command(tmp_path, api_url, forked=False)
    popen, prefix = command._popen, BOUND_BY_MODES if os.geteuid() == 0 else ()
    command._popen = lambda words, **options: popen([*prefix, *words], **options)
    checkpoints = tmp_path / "store" / "runs" / RUN / "checkpoints"
    process = command.start()
    wait_for(lambda: (checkpoints / "step-00000010-attempt-0001").exists(), process, "step 10", command.output)
    checkpoints.chmod(0o555)
    assert process.wait(timeout=patience_seconds()) == RESUMABLE, command.output()
    checkpoints.chmod(0o775)
    ended = command.receipts()[-1]
    assert "Permission denied" in ended.detail and "make it writable" in ended.detail
    assert (ended.reason, ended.decision.action) == ("storage", "stop")
    command.train()
    assert command.state_sha256() == undisturbed_sha256


@pytest.mark.slow
def test_a_finished_run_whose_promotion_is_refused_is_promoted_by_the_same_command(
    remote: Command, proxy: FaultProxy
) -> None:
    proxy.aim(NetworkFault.REFUSED, "PUT .*/models/", times=FOR_EVER)
    remote.train(exit_code=RESUMABLE)
    assert remote.state().finished is not None
    proxy.aims.clear()
    remote.train()
    assert remote.champion() is not None


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
