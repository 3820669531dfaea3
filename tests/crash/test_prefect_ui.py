"""The UI in a real browser: after a run with two failures, reasons, tables and the curve are on one page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.crash.chromium import PAGE_MILLISECONDS
from tests.crash.prefect_api import ask
from tests.crash.shown_run import ShownRun
from tests.crash.training_command import Command
from tests.processes.fork_server import DRAWS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("ui")]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> ShownRun:
    """A run whose trainer was killed once and whose machine was taken away once, finished by a second flow run."""
    variables = {"CAIRN_FAULTS": "kill@8,preempt@33", DRAWS: "1"}
    command = Command(tmp_path_factory.mktemp("ui"), api_url, environment=variables)
    command.train("--set", "evaluation.every_commits=4", exit_code=75)
    command.train("--set", "evaluation.every_commits=4")
    return ShownRun(command)


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    """A fresh page, as wide as a laptop, that speaks to this machine alone."""
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    context.route(re.compile(r"^https?://(?!127\.0\.0\.1)"), lambda route: route.abort())
    page = context.new_page()
    page.set_default_timeout(PAGE_MILLISECONDS)
    yield page
    context.close()


def ui_of(api_url: str) -> str:
    return api_url.removesuffix("/api")


def flow_run_ids(shown: ShownRun) -> list[str]:
    """Both flow runs of the run, in order."""
    attempts = shown.command.state().attempts
    return list(dict.fromkeys(attempt.flow_run_id or "" for attempt in attempts))


def open_flow_run(page: "Page", shown: ShownRun, flow_run_id: str) -> None:
    page.goto(f"{ui_of(shown.api_url)}/runs/flow-run/{flow_run_id}", wait_until="domcontentloaded")


def open_overview(page: "Page", shown: ShownRun, *, ui: str = "") -> None:
    """Open the page of the run that its last flow run shows."""
    rule = {"flow_runs": {"id": {"any_": [flow_run_ids(shown)[-1]]}}, "limit": 5}
    (overview,) = ask(shown.api_url, "artifacts/filter", rule)
    page.goto(f"{ui_of(shown.api_url)}{ui}/artifacts/artifact/{overview['id']}", wait_until="domcontentloaded")


def wait_for_words(page: "Page", *words: str) -> None:
    for word in words:
        page.get_by_text(word).first.wait_for(state="visible")


def test_the_page_of_the_flow_run_names_the_reasons(page: "Page", shown: ShownRun, tmp_path: Path) -> None:
    first, second = flow_run_ids(shown)
    open_flow_run(page, shown, first)
    wait_for_words(page, "Crashed", "run:bard", "reason:preempted", "bard, attempt 2")
    page.screenshot(path=tmp_path / "preempted.png")
    open_flow_run(page, shown, second)
    wait_for_words(page, "Completed", "reason:completed")
    page.screenshot(path=tmp_path / "completed.png")


def test_the_tasks_of_the_flow_run_carry_their_attempt_and_its_end(
    page: "Page", shown: ShownRun, tmp_path: Path
) -> None:
    open_flow_run(page, shown, flow_run_ids(shown)[0])
    page.get_by_text("Task Runs", exact=True).first.click()
    wait_for_words(page, "attempt 2 (after lost)")
    page.screenshot(path=tmp_path / "tasks.png", full_page=True)
    assert "Lost" in page.inner_text("body")


def test_the_flow_run_has_one_artifact(page: "Page", shown: ShownRun, tmp_path: Path) -> None:
    open_flow_run(page, shown, flow_run_ids(shown)[1])
    page.get_by_text("Artifacts", exact=True).first.click()
    wait_for_words(page, "cairn-bard")
    page.screenshot(path=tmp_path / "artifacts.png", full_page=True)
    assert page.get_by_text("cairn-bard").count() == 1


def test_the_page_of_the_run_has_receipts_budgets_evaluations_and_links_in_tables_that_are_tables(
    page: "Page", shown: ShownRun, tmp_path: Path
) -> None:
    page.set_viewport_size({"width": 1400, "height": 2600})
    open_overview(page, shown)
    page.locator("table").first.wait_for(state="visible")
    page.screenshot(path=tmp_path / "overview.png", full_page=True)
    text = page.inner_text("body")
    words = ("preempted", "lost", "completed", "spent since progress", "evaluator-failed", "val_loss", "verdict")
    assert [word for word in words if word not in text] == []
    assert page.locator("table").count() == 3
    link = page.get_by_role("link", name="attempt 1, 2").get_attribute("href") or ""
    assert link.endswith(f"/runs/flow-run/{flow_run_ids(shown)[0]}")
    for table in page.locator("table").all():
        room = table.evaluate("table => [table.scrollWidth, table.closest('div').clientWidth]")
        assert room[0] <= room[1] <= 1400


@pytest.mark.parametrize("ui", ["", "/v2"], ids=["V1", "V2"])
def test_the_curve_is_a_picture_that_was_drawn(page: "Page", shown: ShownRun, tmp_path: Path, ui: str) -> None:
    open_overview(page, shown, ui=ui)
    picture = page.locator("img[alt='curves of bard']").first
    picture.wait_for(state="visible")
    assert picture.evaluate("image => image.complete && image.naturalWidth") == 900
    page.screenshot(path=tmp_path / "curve.png", full_page=True)
    wait_for_words(page, "step 60 of 60")


def test_the_page_asks_nobody_else_on_the_network_for_anything(page: "Page", shown: ShownRun) -> None:
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    open_flow_run(page, shown, flow_run_ids(shown)[1])
    wait_for_words(page, "Completed")
    outside = sorted(url for url in asked if url.startswith("http") and not url.startswith(ui_of(shown.api_url)))
    assert outside == []
