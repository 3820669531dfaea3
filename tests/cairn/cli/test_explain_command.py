"""`cairn explain`: how an attempt began, went and ended, in words that fit a screen; its fields: test_help."""

import io
import json
import os
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cairn.cli.texts import print_blocks
from cairn.reports.errors import RunNotFound
from cairn.reports.queries.post_mortem import PostMortem, gather_post_mortem
from cairn.reports.text.answer_text import describe_end
from cairn.reports.text.post_mortem_text import post_mortem_blocks
from cairn.storage.checkpoints.resume_point import quarantine_checkpoint
from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.run_entries import AttemptEnded, Decision
from cairn.storage.logs.run_state import RefusedEntry
from cairn.storage.logs.step_log import Heartbeat
from cairn.storage.stores.codec import encode
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.attempt.attempt_entries import NO_REMEDY, AttemptOver, write_receipt
from cairn.tasks.configuration.settings import BudgetsConfig
from cairn.tasks.policy.budgets import decide
from cairn.tasks.policy.failures import ErrorKind, Evidence, ExceptionReport, classify
from tests import entries
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun

HUMAN = Writer(host="here", pid=1)
KILLED, OUT_OF_MEMORY = Evidence(exit_code=-9), Evidence(exit_code=-9, oom_kills=1)


def words(message: str, kind: ErrorKind = ErrorKind.BUG, **more: Any) -> Evidence:
    """An exit with the last words of an exception."""
    report = ExceptionReport(kind=kind, exception="FileNotFoundError", message=message, traceback=(), **more)
    return Evidence(exit_code=1, last_words=report)


ENDS: dict[str, tuple[Evidence, int, tuple[str, ...]]] = {
    "a kill, by its signal and by what is missing": (
        Evidence(exit_code=-9, rss_bytes=400_000_000),
        15,
        ("he trainer process was ended by signal 9 (SIGKILL)", "counted 0 kills for memory", "used up to 400 MB"),
    ),
    "what was lost, in steps and device time": (
        KILLED,
        15,
        ("Lost: 5 steps (steps 11 to 15) and 2.0 s of its 3.0 s device time; everything up to step 10 was kept.",),
    ),
    "one step as one step": (KILLED, 11, ("Lost: 1 step (step 11) and ",)),
    "out of memory, by the kernel's count and the limit": (
        Evidence(exit_code=-9, oom_kills=1, rss_bytes=8_000_000_000, memory_limit_bytes=8_500_000_000),
        13,
        ("1 kill for memory (oom_kill)", "8 GB of 8.5 GB allowed"),
    ),
    "silence, against what was allowed": (
        Evidence(exit_code=-9, silent_seconds=61.0, allowed_seconds=60.0, heartbeat_step=14),
        14,
        ("no sign of life for 61 s", "its own steps allowed 60 s", "for its silence after step 14"),
    ),
    "a notice, by who gave it": (
        Evidence(exit_code=0, stop_signal="SIGTERM", notice="aws says so", grace_ended=True),
        10,
        ("reason preempted: aws says so", "otice to leave by SIGTERM.", "grace period was over"),
    ),
    "guilty windows, cut where there are many": (
        words("bad", ErrorKind.BAD_DATA, step=14, windows=tuple(range(20))),
        13,
        ("(windows 0, 1, 2, 3, 4, 5, 6, 7, … and 12 more)",),
    ),
}


@pytest.fixture
def begun(fresh: FabricatedRun) -> FabricatedRun:
    """The run with its first attempt."""
    fresh.start()
    return fresh


def explained(run: FabricatedRun, number: int | None = None) -> str:
    """The text without its line breaks, so that a claim may span lines."""
    return " ".join(printed(gather_post_mortem(run.log, number)).split())


def printed(facts: PostMortem) -> str:
    """What `cairn explain` prints of a post-mortem where the terminal is wide."""
    with redirect_stdout(io.StringIO()) as out:
        print_blocks(*post_mortem_blocks(facts))
    return out.getvalue()


def end_by(
    run: FabricatedRun, evidence: Evidence, *, step: int, writer: Writer | None = None, **budgets: Any
) -> AttemptEnded:
    """End the open attempt as the real parent does: classified, decided, on record."""
    state = run.log.refresh()
    number = state.latest_attempt
    last = Heartbeat(attempt=number, beat=1, step=step, train_loss=None, tokens=step, gpu_seconds=step / 5)
    over = AttemptOver(attempt=number, evidence=evidence, last=last)
    policy = partial(decide, BudgetsConfig(**budgets))
    body = write_receipt(state, classify(evidence), over, policy, NO_REMEDY)
    own = Writer(host="elsewhere", pid=1, attempt=state.latest_attempt)
    run.log.append(lambda state: body, writer=writer or own)
    return body


def test_the_newest_attempt_that_did_not_complete_is_explained(bard: FabricatedRun) -> None:
    assert gather_post_mortem(bard.log).attempt.receipt.attempt == 1  # type: ignore[union-attr]


def test_a_machine_that_several_attempts_were_lost_with_is_named(fresh: FabricatedRun) -> None:
    for number in range(3):
        fresh.start(host="n7")
        end_by(fresh, Evidence(exit_code=-9 if number else None), step=number)
    assert "With n1. 3 of this run's attempts were lost or hung with n7" in explained(fresh)


def test_without_a_failed_attempt_the_newest_is_explained(begun: FabricatedRun) -> None:
    begun.complete()
    assert explained(begun).startswith("Attempt 1 of 1 of run fresh finished the run at step 40 of 40, on 2026-01-01")


def test_a_run_without_attempts_says_that_nothing_was_tried(fresh: FabricatedRun) -> None:
    assert "has no attempts yet" in explained(fresh) and "cairn train --run-id fresh" in explained(fresh)


def test_a_run_without_attempts_has_no_first_one(fresh: FabricatedRun) -> None:
    with pytest.raises(RunNotFound, match="it has none yet"):
        gather_post_mortem(fresh.log, 1)


@pytest.mark.parametrize("claim", ENDS)
def test_an_end_is_explained(begun: FabricatedRun, claim: str) -> None:
    evidence, step, said = ENDS[claim]
    begun.commit(10)
    end_by(begun, evidence, step=step)
    text = explained(begun)
    assert [part for part in said if part not in text] == []


def test_an_error_before_the_first_step_says_so_and_says_its_detail_once(begun: FabricatedRun) -> None:
    ended = end_by(begun, words("no text.txt"), step=0)
    text = explained(begun)
    assert "It had trained no step yet, so nothing was lost." in text
    assert "it ended before its first step was done" in text and "error costs no retry" in text
    assert describe_end(ended) == "FileNotFoundError: no text.txt", "the decision does not repeat the detail"


def test_what_a_decision_changed_is_told_with_the_next_attempt(begun: FabricatedRun) -> None:
    end_by(begun, OUT_OF_MEMORY, step=3)
    begun.start()
    remedy = "activations are computed again, bits stay equal"
    assert f"try again: oom: resume from the newest committed checkpoint, {remedy}." in explained(begun)


def test_a_halved_micro_batch_is_said_to_change_the_bits_where_the_run_is_looked_at(
    fresh: FabricatedRun, cairn: Cairn
) -> None:
    for _ in range(2):  # the first remedy is one that keeps the bits
        fresh.start(activation_checkpointing=fresh.log.refresh().recomputes_activations)
        end_by(fresh, OUT_OF_MEMORY, step=fresh.log.state.latest_attempt)
    assert "micro-batch 2 to 1, bits differ from here" in explained(fresh)
    assert "halved the micro-batch to 1" in cairn("status", "fresh").out


def test_a_changed_configuration_is_shown_key_by_key(begun: FabricatedRun) -> None:
    end_by(begun, KILLED, step=3)
    begun.start(overrides=["checkpoint.every_steps=7"])
    end_by(begun, KILLED, step=3)
    changed = "different from attempt 1: checkpoint.every_steps 200 → 7 (decided after attempt 1: nothing)."
    assert changed in explained(begun)


def test_quarantine_in_force_is_shown_with_its_reason(begun: FabricatedRun) -> None:
    begun.log.append(lambda state: entries.spoiled(5, 3), writer=HUMAN)
    end_by(begun, KILLED, step=3)
    begun.start()
    text = explained(begun, 2)
    assert "at the start 2 windows of it quarantined, never drawn again." in text
    assert "1 bad-data 5, 3 token ids out of range" in text
    assert "never drawn again" not in explained(begun, 1)


def test_an_end_that_somebody_else_recorded_says_who_and_how(begun: FabricatedRun) -> None:
    end_by(begun, Evidence(heartbeat_step=3), step=3, writer=Writer(host="rescuer", pid=77))
    text = explained(begun)
    assert "left no last words: its end was put on record by process 77 on rescuer, which watched" in text
    assert "the lease of 30 s" in text


def test_an_end_found_on_the_same_host_names_the_missing_process(begun: FabricatedRun) -> None:
    end_by(begun, Evidence(heartbeat_step=3), step=3, writer=Writer(host="elsewhere", pid=77))
    assert "on the same host, where process 11 was no longer there" in explained(begun)


def test_an_open_attempt_is_told_as_it_stands(bard: FabricatedRun) -> None:
    text = explained(bard, 2)
    assert text.startswith("Attempt 2 of 2 of run bard has not ended: it is at step 33 of 40; its last sign of life")


def test_a_heartbeat_that_fell_silent_is_noticed(bard: FabricatedRun, tmp_path: Path) -> None:
    beat = tmp_path / "store" / "runs" / "bard" / "heartbeats" / "attempt-0002.json"
    os.utime(beat, (1_800_000_000, 1_800_000_000))
    now = datetime.fromtimestamp(1_800_003_600, tz=UTC)
    text = printed(gather_post_mortem(bard.log, 2, now=now))
    assert "fell silent; its last sign of life was 1 h ago" in text


def test_an_owner_whose_process_is_gone_is_known_on_its_machine(fresh: FabricatedRun) -> None:
    fresh.start(placement=entries.gone_placement())
    assert "when its process disappeared, and its end is not on record yet" in explained(fresh)


def test_a_resumed_attempt_says_from_where_and_what_is_done_again(bard: FabricatedRun) -> None:
    text = explained(bard, 2)
    origin = "from step 20, committed by attempt 1 on 2026-01-01 12:00:03 UTC and verified at start"
    assert f"{origin} (step-00000020-attempt-0001" in text


def test_a_checkpoint_that_could_not_be_read_is_passed_over_with_its_reason_and_the_objects_name(
    begun: FabricatedRun,
) -> None:
    begun.commit(10)
    begun.commit(20)
    end_by(begun, KILLED, step=25)
    damaged = begun.log.state.newest_committed.committed
    key = f"{damaged.prefix}/weights-00001-of-00001.safetensors"
    quarantine_checkpoint(begun.log, damaged, f"{key}: sha256 is {'0' * 64}", writer=HUMAN)
    begun.start()
    text = explained(begun, 2)
    assert "could not start from: step attempt" in text and "20 1 quarantined" in text
    assert " weights-00001-of-00001.safetensors: sha256 is 000" in text
    assert "The attempt before had reached step 25; steps 11 to 25 had to be done again." in text


def test_bytes_without_a_commit_are_passed_over_with_their_reason(begun: FabricatedRun, store: LocalStore) -> None:
    begun.commit(10)
    store.write(
        f"{begun.log.prefix}/checkpoints/step-00000020-attempt-0001/weights-00001-of-00001.safetensors", b"half"
    )
    end_by(begun, KILLED, step=20)
    begun.start()
    assert "20 1 writing" in explained(begun, 2)


def test_an_entry_without_effect_says_why_as_text_and_as_json(begun: FabricatedRun) -> None:
    end_by(begun, Evidence(heartbeat_step=3), step=3, writer=HUMAN)
    begun.start()
    seq = begun.log.seq + 1
    refused = RefusedEntry(seq=seq, kind="checkpoint-committed", attempt=1)
    begun.log.state = replace(begun.log.state, refused=History([refused]))
    why = "checkpoint-committed, but attempt 2 had taken over"
    assert f"its entry {seq} had no effect: {why}" in explained(begun, 1)
    assert json.loads(encode(gather_post_mortem(begun.log, 1)))["attempt"]["refused"][str(seq)].startswith(why)


def test_a_spent_budget_is_said_to_be_spent(begun: FabricatedRun) -> None:
    end_by(begun, KILLED, step=3, lost={"retries": 0})
    text = explained(begun)
    assert "The budget lost had to pay for this end and could not: it is spent." in text
    assert "raise budgets.lost.retries" in text


def test_stderr_cannot_steer_the_terminal(begun: FabricatedRun) -> None:
    end_by(begun, Evidence(exit_code=1, stderr_tail=("\x1b]0;owned\x07\x1b[31mred\x1b[0m", "\x07bell\x9b2J")), step=3)
    text = printed(gather_post_mortem(begun.log))
    assert "  red\n" in text and all(char.isprintable() or char == "\n" for char in text)


def test_an_attempt_fits_one_screen_however_much_there_is(begun: FabricatedRun, cairn: Cairn) -> None:
    first = [begun.commit(step) for step in range(1, 30)]
    for reference in first:
        begun.evaluate(reference, loss=2.0)
        begun.log.append(lambda state: entries.spoiled(*range(500), detail="damaged " * 60), writer=HUMAN)
    end_by(begun, KILLED, step=30)
    begun.start(overrides=[f"budgets.{name}.retries=77" for name in ("lost", "oom", "hung", "storage", "diverged")])
    end_by(begun, Evidence(exit_code=1, stderr_tail=tuple("error " * 50 for _ in range(40))), step=35)
    lines = cairn("explain", "fresh", COLUMNS="110").out.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 110


def test_evaluations_of_its_checkpoints_are_told(bard: FabricatedRun) -> None:
    told = explained(bard, 1)
    assert "evaluations of its checkpoints: step status suite val_loss" in told and "20 recorded held-out" in told


def test_a_fenced_end_blames_the_newer_attempt(begun: FabricatedRun) -> None:
    decision = Decision(action="stop", reason="attempt 2 owns the run")
    body = entries.ended(
        1,
        "fenced",
        detail="attempt 2 owns the run",
        last_step=3,
        decision=decision,
        evidence={"fenced": "attempt 2 owns the run"},
    )
    begun.log.append(lambda state: body, writer=HUMAN)
    assert "gave way at step 3 of 40, on" in explained(begun)


def test_an_unknown_reason_and_bare_evidence_are_told_too(begun: FabricatedRun) -> None:
    body = entries.ended(1, "moon-phase", evidence={}, decision=entries.decided(action="stop"))
    begun.log.append(lambda state: body, writer=HUMAN)
    text = explained(begun)
    assert "for the reason moon-phase" in text and "No exit code, no signal and no last words are on record" in text


def test_a_many_device_placement_is_told(fresh: FabricatedRun) -> None:
    place = entries.placement(host="node-3", pid=42, device="cuda", world_size=8)
    fresh.start(placement=place)
    assert "host node-3, process 42, cuda × 8 (a CPU), 3 threads on 7 cores, boot b" in explained(fresh)
