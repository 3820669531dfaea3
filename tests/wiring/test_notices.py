"""A notice at the moment of a claim: before it nothing is claimed, after it the attempt is given up with a receipt."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cairn.flows.run import run_start
from cairn.flows.run.active_run import ActiveRun
from cairn.flows.run.attempt_trainer import AttemptTrainer
from cairn.flows.run.run_start import claim_next_attempt
from cairn.flows.run.steps import PLAIN
from cairn.flows.train_gpt import train_attempt
from cairn.storage.errors import AppendUnknown
from cairn.storage.logs.run_entries import AttemptStarted
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.errors import ShutdownRequested, TrainerGone
from tests.wiring.flow_in_process import FlowWorld

REASONS = {"SIGTERM": "preempted", "SIGINT": "cancelled", "SIGHUP": "preempted", "SIGUSR1": "preempted"}


def after_the_claim(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something as soon as the store has taken the entry of a claim."""
    create = LocalStore.create

    def create_and_act(store: LocalStore, key: str, data: Any) -> bool:
        created = create(store, key, data)
        if b'"kind": "attempt-started"' in bytes(data):
            act()
        return created

    monkeypatch.setattr(LocalStore, "create", create_and_act)


@pytest.mark.parametrize("name", REASONS)
def test_a_notice_right_after_the_claim_gives_the_attempt_up_with_a_receipt(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shutdown = ShutdownSignal()
    after_the_claim(monkeypatch, lambda: shutdown.request(name))
    flow.train(shutdown=shutdown)
    (record,) = flow.log.state.attempts
    assert record.ended is not None and record.ended.reason == REASONS[name]
    assert (record.ended.decision.charged, record.ended.last_step) == (None, 0)
    assert not list(flow.folder.rglob("*.heard")), "no trainer was sent anything"


@pytest.mark.parametrize("name", REASONS)
def test_a_notice_before_the_claim_claims_nothing(flow: FlowWorld, name: str) -> None:
    shutdown = ShutdownSignal()
    shutdown.request(name)
    state = flow.train(shutdown=shutdown)
    assert flow.log.state.attempts == () and flow.log.state.opened is not None
    assert "asked to leave before its next attempt" in str(state.message)


def test_a_notice_while_a_claim_is_prepared_claims_nothing(flow: FlowWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown = ShutdownSignal()
    with flow.opened(shutdown=shutdown) as run:
        refuse, calls = ActiveRun.refuse_to_begin, list[float]()

        def notice_at_the_last(given: ActiveRun, seconds: float = 0.0) -> None:
            calls.append(seconds)
            shutdown.request("SIGTERM")
            refuse(given, seconds)

        monkeypatch.setattr(ActiveRun, "refuse_to_begin", notice_at_the_last)
        with pytest.raises(ShutdownRequested):
            claim_next_attempt(run)
    assert calls and flow.log.state.attempts == ()


def test_a_notice_ends_the_wait_for_a_silent_owner_and_the_owner_stays(flow: FlowWorld) -> None:
    shutdown = ShutdownSignal()
    with flow.opened("lease.seconds=600", shutdown=shutdown) as run:
        claim_next_attempt(run)
        shutdown.request("SIGTERM")
        with pytest.raises(ShutdownRequested):
            claim_next_attempt(run)
    (record,) = flow.log.state.attempts
    assert record.ended is None


@pytest.mark.parametrize("noticed", [False, True])
def test_a_claim_of_unknown_outcome_that_was_written_is_taken_on_and_not_waited_for_as_a_strangers(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    shutdown, unknown = ShutdownSignal(), list[AttemptStarted]()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    claim = run_start.attempt_entries.claim_attempt

    def claim_without_answer(*given: Any) -> AttemptStarted:
        unknown.append(claim(*given))
        if noticed:
            shutdown.request("SIGTERM")
        raise AppendUnknown("no answer")

    monkeypatch.setattr(run_start.attempt_entries, "claim_attempt", claim_without_answer)
    with flow.opened(shutdown=shutdown) as run:
        started = claim_next_attempt(run)
        assert unknown == [started]
        if noticed:
            assert train_attempt(run, started, PLAIN).reason == "preempted"
    assert len(flow.log.state.attempts) == 1


def test_a_notice_while_a_trainer_waits_or_trains_is_passed_on_to_it(flow: FlowWorld) -> None:
    shutdown, others = ShutdownSignal(), set(threading.enumerate())
    with flow.opened("checkpoint.grace_seconds=60", shutdown=shutdown) as run:
        trainer = AttemptTrainer(run, claim_next_attempt(run))
        with trainer.running():
            assert trainer._process is not None
            trainer._process.wait_ready()
            shutdown.request("SIGTERM")
            evidence = trainer.evidence(TrainerGone())
    for timer in set(threading.enumerate()) - others:
        if isinstance(timer, threading.Timer):
            timer.cancel()
    assert (evidence.exit_code, evidence.grace_ended) == (-signal.SIGTERM, False)
