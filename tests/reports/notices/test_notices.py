"""Word of a run's decisions: to a real command and a real HTTP server that hangs, refuses and comes back."""

import json
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from cairn.flows.orchestrator.run_notices import notices_of
from cairn.reports.errors import ReportError
from cairn.reports.notices.notice import (
    CommandReceiver,
    Notice,
    NoticeDelivery,
    Receiver,
    WebhookReceiver,
    delivering_notices,
    find_notices,
    make_receivers,
)
from cairn.storage.logs.registry import Registry, RegistryState
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.configuration_source import read_notify
from cairn.tasks.configuration.settings import NotifyConfig
from cairn.tasks.errors import InvalidConfiguration
from tests import entries
from tests.entries import NOON
from tests.fabricated_run import HUMAN, FabricatedRun, fabricate, store_bard
from tests.reports.webhook import PATIENCE_SECONDS, Hook, serving_hook

SOON = NOON + timedelta(minutes=5)


@pytest.fixture
def hook() -> Iterator[Hook]:
    with serving_hook() as found:
        yield found


def webhook(hook: Hook, timeout_seconds: float = PATIENCE_SECONDS) -> WebhookReceiver:
    return WebhookReceiver(hook.url, timeout_seconds)


def found(run: FabricatedRun, *, now: datetime = SOON) -> list[Notice]:
    def read_registry(alias: str) -> RegistryState:
        return Registry(run.log.store, alias).refresh()

    return list(find_notices(run.log.run_id, run.log.state, read_registry, now=now))


def finished(store: LocalStore, *overrides: str, run_id: str = "bard") -> FabricatedRun:
    run = fabricate(store, run_id)
    run.start(overrides=overrides)
    run.complete()
    return run


def kinds(run: FabricatedRun) -> list[str]:
    return [str(notice.kind) for notice in found(run)]


def test_a_finished_run_is_told_and_a_running_one_has_nothing_to_tell(store: LocalStore) -> None:
    assert found(store_bard(store)) == [] and kinds(finished(store, run_id="done")) == ["finished"]


@pytest.mark.parametrize(
    ("reason", "action", "charged", "told"),
    [
        ("lost", "stop", "lost", ["budget-exhausted"]),
        ("error", "stop", None, ["stopped"]),
        ("storage", "stop", None, ["stopped"]),
        ("lost", "resume", "lost", []),
        ("preempted", "resume", "preempted", []),
        ("cancelled", "stop", None, []),
        ("paused", "stop", None, []),
    ],
)
def test_an_end_is_told_where_nothing_goes_on_by_itself(
    fresh: FabricatedRun, reason: str, action: str, charged: str | None, told: list[str]
) -> None:
    fresh.start()
    fresh.end(reason, action=action, charged=charged)
    assert kinds(fresh) == told


def test_a_promotion_that_waits_for_a_person_is_told(store: LocalStore) -> None:
    run = finished(store, "promotion.require_approval=true")
    assert kinds(run) == ["finished", "approval-wanted"]


def test_what_was_decided_more_than_a_day_ago_is_not_told(store: LocalStore) -> None:
    assert found(finished(store), now=NOON + timedelta(days=2)) == []


def test_one_decision_has_the_same_key_in_every_process(store: LocalStore) -> None:
    run = finished(store)
    assert [item.key for item in found(run)] == [item.key for item in found(run, now=SOON + timedelta(hours=1))]


def test_a_command_reads_the_notice_as_json(store: LocalStore, tmp_path: Path) -> None:
    script = f"import sys, pathlib; pathlib.Path({str(tmp_path / 'told')!r}).write_bytes(sys.stdin.buffer.read())"
    CommandReceiver(shlex.join([sys.executable, "-c", script]), PATIENCE_SECONDS).receive(found(finished(store))[0])
    told = json.loads((tmp_path / "told").read_text())
    assert (told["id"], told["kind"], told["step"]) == (f"bard/finished-0001@{NOON.isoformat()}", "finished", 40)


@pytest.mark.parametrize("command", ["false", "sleep 600", "no-such-program-anywhere"])
def test_a_command_that_fails_hangs_or_is_missing_raises_within_its_time(store: LocalStore, command: str) -> None:
    with pytest.raises(Exception, match=r"left with 1|took more than|No such file"):
        CommandReceiver(command, 0.3).receive(found(finished(store))[0])


def test_a_webhook_is_told_once_by_however_many_processes(store: LocalStore, hook: Hook) -> None:
    notices = found(finished(store))
    for _ in range(3):
        NoticeDelivery(store, webhook(hook)).deliver(notices)
    assert [item["id"] for item in hook.posted] == [f"bard/finished-0001@{NOON.isoformat()}"]


def test_each_receiver_is_told_by_itself(store: LocalStore, hook: Hook) -> None:
    notices, false = found(finished(store)), CommandReceiver("true", PATIENCE_SECONDS)
    NoticeDelivery(store, false).deliver(notices)
    NoticeDelivery(store, webhook(hook)).deliver(notices)
    assert len(hook.posted) == 1


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_webhook_that_refuses_is_told_again(store: LocalStore, hook: Hook, status: int) -> None:
    delivery, notices = NoticeDelivery(store, webhook(hook)), found(finished(store))
    hook.statuses = [status]
    with pytest.raises(ReportError):
        delivery.deliver(notices)
    delivery.deliver(notices)
    assert len(hook.posted) == 1


def test_an_error_of_a_webhook_does_not_say_its_address(store: LocalStore, hook: Hook) -> None:
    hook.statuses = [500]
    with pytest.raises(ReportError) as raised:
        webhook(hook).receive(found(finished(store))[0])
    assert "hidden-word" not in f"{raised.value} {raised.value.__cause__}"


def test_a_damaged_record_of_what_was_told_tells_again(store: LocalStore, hook: Hook) -> None:
    notices = found(finished(store))
    store.write("runs/bard/notices/webhook.json", b"nonsense")
    NoticeDelivery(store, webhook(hook)).deliver(notices)
    assert len(hook.posted) == 1


def told(store: LocalStore, receiver: Receiver, notices: list[Notice], said: list[str], **options: float) -> Any:
    return delivering_notices(store, [receiver], lambda: notices, said.append, **{"every_seconds": 0.01, **options})


def test_a_webhook_that_comes_back_is_told_while_the_block_runs(store: LocalStore, hook: Hook) -> None:
    hook.statuses, said = [503, 503], list[str]()
    with told(store, webhook(hook), found(finished(store)), said):
        assert hook.taken.wait(PATIENCE_SECONDS)
    assert (len(hook.posted), len(said)) == (1, 1) and "training goes on" in said[0]


def test_a_webhook_that_hangs_holds_up_neither_the_block_nor_its_end(store: LocalStore, hook: Hook) -> None:
    hook.hangs = True
    with told(store, webhook(hook), found(finished(store)), [], final_seconds=0.2):
        assert hook.arrived.wait(PATIENCE_SECONDS)
    assert hook.posted == []  # the block has ended while the receiver still hangs


def test_what_is_decided_last_is_told_at_the_end_of_the_block(store: LocalStore, hook: Hook) -> None:
    notices = list[Notice]()
    with told(store, webhook(hook), notices, [], every_seconds=600.0, final_seconds=PATIENCE_SECONDS):
        notices += found(finished(store))
    assert len(hook.posted) == 1


def test_the_environment_names_the_receivers_of_a_watcher() -> None:
    notify = read_notify({"CAIRN_NOTIFY__WEBHOOK": "http://127.0.0.1/x", "CAIRN_NOTIFY__COMMAND": "mail me"})
    assert [receiver.name for receiver in make_receivers(notify)] == ["command", "webhook"]


def test_a_webhook_that_is_no_address_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        read_notify({"CAIRN_NOTIFY__WEBHOOK": "hidden-word"})
    assert "http(s) address" in str(raised.value) and "hidden-word" not in str(raised.value)


def test_a_configuration_shows_no_address() -> None:
    assert "hidden" not in repr(NotifyConfig(webhook=SecretStr("http://127.0.0.1/hidden")))


def test_the_notice_of_an_error_says_its_detail_once(store: LocalStore) -> None:
    run = fabricate(store, "bard")
    run.start()
    decision = entries.decided(action="stop", reason="no text.txt", charged=None)
    body = entries.ended(1, "error", detail="no text.txt", decision=decision)
    run.log.append(lambda state: body, writer=HUMAN)
    assert [notice.text for notice in found(run)] == ["cairn run bard: attempt 1 ended: error: no text.txt"]


def test_a_damaged_checkpoint_is_told(bard: FabricatedRun) -> None:
    reference = bard.log.state.checkpoints[0].committed.reference
    bard.log.append(lambda state: entries.damaged(reference, "it holds other bytes"), writer=HUMAN)
    assert [(notice.kind, "other bytes" in notice.text) for notice in found(bard)] == [("integrity", True)]


def test_now_is_this_machines_clock(store: LocalStore) -> None:
    run = fabricate(store, "today", opened_at=datetime.now(UTC))
    run.start()
    run.end("error", action="stop")
    assert [notice.kind for notice in notices_of(run.log)] == ["stopped"]
