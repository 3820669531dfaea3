"""What a run's page says, and whose flow runs are ended; how the UIs draw it: tests/crash/test_prefect_ui.py."""

import inspect
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote
from uuid import UUID

import pytest

from cairn.flows.evaluate_promoted import evaluate_promoted
from cairn.flows.orchestrator.run_overview import (
    MOST_LOST_FLOW_RUNS,
    EvaluationForm,
    evaluation_markdown,
    lost_flow_runs,
    overview_markdown,
)
from cairn.reports.queries.evaluations import compare_evaluations
from cairn.reports.queries.run_lookup import find_checkpoint
from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.run_state import AttemptRecord, RunState
from cairn.storage.stores.local_store import LocalStore
from tests import entries
from tests.fabricated_run import FabricatedRun

FORM = EvaluationForm(
    deployment_id=UUID(int=7),
    kept={"store": "s3://bucket/cairn (old)", "store_credentials": "team"},
    suites=(Path("deployments/suites/repetition.toml"),),
)


def test_an_open_question_stands_above_the_curve_and_is_gone_once_it_is_answered(bard: FabricatedRun) -> None:
    page = overview_markdown(bard.log, "![curves]()", "**May it?**")
    assert page.index("**May it?**") < page.index("![curves]()") < page.index("## Attempts")
    assert "**May it?**" not in overview_markdown(bard.log, "![curves]()")


def test_the_best_checkpoint_is_measured_again_under_another_suite_by_a_link_that_fills_the_form_in(
    bard: FabricatedRun,
) -> None:
    page = overview_markdown(bard.log, "", form=FORM)
    links = dict(
        re.findall(r"\[([^\]]+)\]\(\.\./\.\./deployments/deployment/[-0-9a-f]+/run\?parameters=([^)]+)\)", page)
    )
    values = {name: json.loads(unquote(filled)) for name, filled in links.items()}
    kept = {"reference": "bard@20", **FORM.kept}
    assert values == {
        "its run's own suites": {**kept, "again": True},
        "repetition": {**kept, "suite": "deployments/suites/repetition.toml"},
    }
    assert all(name in inspect.signature(evaluate_promoted).parameters for filled in values.values() for name in filled)


def test_an_evaluation_is_shown_in_the_columns_of_its_runs_page(bard: FabricatedRun, store: LocalStore) -> None:
    found = find_checkpoint(store, "bard@20")
    view = compare_evaluations(found, [item for item in bard.log.state.evaluations if item.step == 20])
    (of_evaluation,) = [line for line in evaluation_markdown(view, "loop 0.9", None).splitlines() if "val" in line]
    (of_run,) = [line for line in overview_markdown(bard.log, "").splitlines() if "val" in line and "status" in line]
    assert of_evaluation.split("|")[3:] == of_run.split("|")[2:]


def test_the_page_of_a_failed_run_begins_with_why_how_far_at_what_cost_and_what_to_do(
    fresh: FabricatedRun, tmp_path: Path
) -> None:
    fresh.start(overrides=("cost.gpu_hour_price=2.25", 'cost.currency="EUR"'))
    fresh.commit(20)
    fresh.end("bad-data", last_step=30, action="stop", gpu_seconds=160.0, wasted_gpu_seconds=8.0)
    _, headline, *_ = overview_markdown(fresh.log, "").split("\n\n")
    assert headline == (
        "**failed: bad-data at 30/40** · 2 min 40 s, 0.10 EUR, 5 % lost · "
        "a person decides: so it was decided; "
        f"then `cairn train --run-id fresh --store {tmp_path}/store` continues from step 20"
    )


def test_what_a_person_is_asked_stands_before_how_the_run_stands(bard: FabricatedRun) -> None:
    page = overview_markdown(bard.log, "", "**May it?**")
    assert page.index("**May it?**") < page.index(" · ")


def test_only_budgets_that_were_touched_are_on_the_page_and_no_long_digest(bard: FabricatedRun) -> None:
    page = overview_markdown(bard.log, "")
    budgets = page.partition("## Budgets")[2].partition("##")[0]
    assert all(" 0 |\n" not in f"{line}\n" for line in budgets.splitlines()[4:]) and budgets
    assert not re.search(r"[0-9a-f]{40}", page)


def test_a_failed_evaluation_says_why_below_its_row_and_once_though_it_was_tried_twice(fresh: FabricatedRun) -> None:
    fresh.start()
    reference = fresh.commit(20)
    for _ in range(2):
        fresh.evaluate(reference, loss=None)
    evaluations = overview_markdown(fresh.log, "").partition("## Evaluations")[2]
    assert re.findall(r"^- step 20.*$", evaluations, re.MULTILINE) == ["- step 20, held-out, failed: it exited with 1"]


MINE = UUID(int=999)


def attempt(number: int, flow_run: int | None, reason: str | None) -> AttemptRecord:
    return AttemptRecord(
        started=entries.started(number),
        flow_run_id=None if flow_run is None else str(UUID(int=flow_run)),
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        ended=None if reason is None else entries.ended(number, reason),
    )


def lost(*attempts: tuple[int | None, str | None]) -> list[int]:
    records = tuple(attempt(number, flow_run, reason) for number, (flow_run, reason) in enumerate(attempts, 1))
    return [flow_run_id.int for flow_run_id in lost_flow_runs(RunState(attempts=History(records)), MINE)]


@pytest.mark.parametrize(
    ("attempts", "closed"),
    [
        pytest.param([(1, "lost"), (999, None)], [1], id="that of a lost attempt is closed"),
        pytest.param([(1, "lost"), (1, "completed"), (999, None)], [], id="one that went on after it is alive"),
        pytest.param(
            [(1, "preempted"), (2, "cancelled"), (3, "error"), (999, None)], [], id="who left in order says so itself"
        ),
        pytest.param([(999, "lost"), (999, None)], [], id="one's own is never closed"),
        pytest.param([(None, "lost"), (999, None)], [], id="without a flow run there is nothing to close"),
    ],
)
def test_of_the_flow_runs(attempts: list[tuple[int | None, str | None]], closed: list[int]) -> None:
    assert lost(*attempts) == closed


def test_after_many_kills_only_the_newest_are_asked_about() -> None:
    assert lost(*((number, "lost") for number in range(1, 100))) == list(range(99, 99 - MOST_LOST_FLOW_RUNS, -1))
