"""`cairn diagnose`, and how a run that stopped early shows in the reading verbs."""

import json
from dataclasses import replace

import pytest

from cairn.reports.queries.evaluations import diagnose_run
from cairn.reports.queries.run_status import list_runs, read_status
from cairn.storage.logs.run_entries import CurveVerdict
from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn
from tests.entries import finished, writer
from tests.fabricated_run import FabricatedRun, write_steps

FALLING = {"train_loss": lambda step: 5.5 - step / 100, "tokens_per_second": 1.0, "seconds": 1.0}


def give_vocabulary(run: FabricatedRun, size: int) -> None:
    """Write as much of the run's snapshot manifest as a verdict reads."""
    run.log.store.write(f"data/{'d' * 64}/snapshot.json", json.dumps({"vocab_size": size, "version": 1}).encode())


@pytest.fixture
def trained(bard: FabricatedRun) -> FabricatedRun:
    """The run with step records: the second attempt resumed at 20 and trained 21 to 25 again."""
    write_steps(bard.log, 1, range(1, 26), **FALLING)
    write_steps(bard.log, 2, range(21, 34), **FALLING)
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
    clipped = {**FALLING, "grad_norm": 4.0}
    write_steps(bard.log, 1, range(1, 20), **FALLING)
    write_steps(bard.log, 2, range(21, 90), **clipped, sample="so")
    write_steps(bard.log, 2, range(90, 99), **{**clipped, "tokens_per_second": 0.1, "seconds": 10.0})
    view = diagnose_run(bard.log).verdict
    assert view.kind == "clipping" and "same text" in view.why and "steps 90 to 98 ran at 0 tokens/s" in view.why


def test_a_run_without_step_records_is_too_early(fresh: FabricatedRun) -> None:
    view = diagnose_run(fresh.log)
    assert (view.verdict.kind, view.step, view.evaluations) == ("too-early", 0, ())


def test_every_evaluation_of_the_line_is_listed_once_in_step_order(trained: FabricatedRun) -> None:
    found = [(item.step, item.metrics["val_loss"], item.verdict) for item in diagnose_run(trained.log).evaluations]
    assert found == [(10, 3.0, None), (20, 2.0, None)]


def test_people_read_verdict_why_and_cures(trained: FabricatedRun, cairn: Cairn) -> None:
    give_vocabulary(trained, 180)
    ended = cairn("diagnose", "bard")
    assert ended.code == 0 and all(word in ended.out for word in ("stuck", "uniform guess", "cure 1", "val_loss"))


def test_a_run_that_stopped_early_says_where_and_why(trained: FabricatedRun, store: LocalStore, cairn: Cairn) -> None:
    third = trained.log.state.newest_committed.committed
    stopped = "val loss 9.0000: 2 evaluations without improving on 2.0000 at step 20"
    body = replace(finished(third.reference), stopped=stopped, rule="patience")
    trained.log.append(lambda state: body, writer=writer(2))
    trained.end("completed", action="finish")
    words = f"stopped early at step 30: {stopped} (early_stop.patience)"
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
    trained.log.append(lambda state: again, writer=writer())
    listed = json.loads(cairn("evaluations", "bard", "--json").out)
    assert [item["verdict"]["kind"] for item in listed if item["verdict"]] == ["healthy"]
    assert diagnose_run(trained.log).evaluations[-1].verdict == judged
