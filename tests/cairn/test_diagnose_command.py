"""`cairn diagnose`, and how a run that stopped early shows in the reading verbs."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cairn.reports.queries.evaluations import diagnose_run
from cairn.reports.queries.run_status import list_runs, read_status
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.run_entries import CurveVerdict, RunFinished
from cairn.storage.logs.step_log import StepRecord, step_log_key
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun

FIELDS = {"run_id", "step", "total_steps", "verdict", "stopped_early", "evaluations"}


def write_steps(run: FabricatedRun, attempt: int, steps: range, *, loss: float = 5.5, **changes: Any) -> None:
    """Write the step records of an attempt as a trainer does; the loss falls by a hundredth a step."""
    usual: dict[str, Any] = {"lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 1.0, "mfu": 0.1, "memory_bytes": 1}
    usual |= {"seconds": 1.0, "probe_loss": None, "sample": None, **changes}
    lines = [StepRecord(step=step, attempt=attempt, train_loss=loss - step / 100, **usual) for step in steps]
    key = step_log_key(run.log.prefix, attempt)
    before = run.log.store.read(key) if run.log.store.size(key) else b""
    run.log.store.write(key, before + b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def give_vocabulary(run: FabricatedRun, size: int) -> None:
    """Write as much of the run's snapshot manifest as a verdict reads."""
    run.log.store.write(f"data/{'d' * 64}/snapshot.json", json.dumps({"vocab_size": size, "version": 1}).encode())


@pytest.fixture
def trained(bard: FabricatedRun) -> FabricatedRun:
    """The run with step records: the second attempt resumed at 20 and trained 21 to 25 again."""
    write_steps(bard, 1, range(1, 26))
    write_steps(bard, 2, range(21, 34))
    return bard


def test_the_verdict_goes_by_the_surviving_line(trained: FabricatedRun) -> None:
    view = diagnose_run(trained.log)
    assert (view.verdict.kind, view.step, view.total_steps, view.verdict.numbers["steps"]) == ("healthy", 33, 40, 33)


def test_the_vocabulary_of_the_snapshot_says_what_a_uniform_guess_loses(trained: FabricatedRun) -> None:
    give_vocabulary(trained, 180)
    view = diagnose_run(trained.log).verdict
    assert view.kind == "stuck" and "ln(180) = 5.19" in view.why and view.cures


def test_a_snapshot_whose_vocabulary_is_no_number_counts_as_unread(trained: FabricatedRun) -> None:
    damaged = json.dumps({"vocab_size": "many", "version": 1}).encode()
    trained.log.store.write(f"data/{'d' * 64}/snapshot.json", damaged)
    assert diagnose_run(trained.log).verdict.kind == "healthy"


def test_clipped_slow_and_repeating_steps_are_found_in_the_step_records(bard: FabricatedRun) -> None:
    write_steps(bard, 1, range(1, 20))
    write_steps(bard, 2, range(21, 90), grad_norm=4.0, sample="so")
    write_steps(bard, 2, range(90, 99), grad_norm=4.0, tokens_per_second=0.1, seconds=10.0)
    view = diagnose_run(bard.log).verdict
    assert view.kind == "clipping" and "same text" in view.why and "steps 90 to 98 ran at 0 tokens/s" in view.why


def test_a_run_without_step_records_is_too_early(fresh: FabricatedRun) -> None:
    view = diagnose_run(fresh.log)
    assert (view.verdict.kind, view.step, view.evaluations) == ("too-early", 0, ())


def test_every_evaluation_of_the_line_is_listed_once_in_step_order(trained: FabricatedRun) -> None:
    found = [(item.step, item.metrics["val_loss"], item.verdict) for item in diagnose_run(trained.log).evaluations]
    assert found == [(10, 3.0, None), (20, 2.0, None)]


def test_json_is_one_document_with_the_fields_of_the_help(trained: FabricatedRun, cairn: Cairn) -> None:
    ended = cairn("diagnose", "bard", "--json")
    assert (ended.code, ended.err, set(json.loads(ended.out))) == (0, "", FIELDS)


def test_people_read_verdict_why_and_cures(trained: FabricatedRun, cairn: Cairn) -> None:
    give_vocabulary(trained, 180)
    ended = cairn("diagnose", "bard")
    assert ended.code == 0 and all(word in ended.out for word in ("stuck", "uniform guess", "cure 1", "val_loss"))


def test_an_unknown_run_is_a_usage_error(cairn: Cairn) -> None:
    assert cairn("diagnose", "nobody").code == 2


def test_a_run_that_stopped_early_says_where_and_why(trained: FabricatedRun, store: LocalStore, cairn: Cairn) -> None:
    third = trained.log.state.newest_committed.committed
    body = RunFinished(
        attempt=2,
        step=30,
        manifest_sha256=third.manifest_sha256,
        state_sha256=third.state_sha256,
        stopped="val loss 9.0000: 2 evaluations without improving on 2.0000 at step 20",
        rule="patience",
    )
    trained.log.append(lambda state: body, writer=Writer(host="here", pid=1, attempt=2))
    trained.end("completed", action="finish")
    words = f"stopped early at step 30: {body.stopped} (early_stop.patience)"
    status = read_status(trained.log)
    assert (status.state, status.stopped_early) == ("finished", words) and words in status.next
    assert list_runs(store)[0].detail == words
    assert diagnose_run(trained.log).stopped_early == words
    assert "stopped early at step 30" in cairn("runs").out and cairn("status", "bard").code == 0


def test_the_verdict_of_an_evaluation_is_in_its_json(trained: FabricatedRun, cairn: Cairn) -> None:
    state = trained.log.state
    judged = CurveVerdict(kind="healthy", why="so", numbers={"train_loss": 2.0})
    body = state.evaluations[-1]
    again = replace(body, verdict=judged)
    trained.log.append(lambda state: again, writer=Writer(host="here", pid=1))
    listed = json.loads(cairn("evaluations", "bard", "--json").out)
    assert [item["verdict"]["kind"] for item in listed if item["verdict"]] == ["healthy"]
    assert diagnose_run(trained.log).evaluations[-1].verdict == judged
