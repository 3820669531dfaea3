"""What a person sees and clicks in the page that `make up` opens, in a real Chromium: Prefect's default UI.

CAIRN_TEST_PICTURES names a folder for the screenshots that the documentation shows: `make pictures`.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from cairn.storage.logs.registry import Registry
from cairn.storage.stores.local_store import LocalStore
from tests.crash.chromium import PAGE_MILLISECONDS, started_chromium
from tests.deployments.started_up import StartedUp
from tests.processes.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Request

pytestmark = [pytest.mark.linux, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("up")]
# Quick witnesses: test_deployment_forms.py beside this file, test_overview_page.py and test_flow_end.py.
Take = Callable[..., None]
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED", "PAUSED"}
FAILURES = {"spent, attempt 1": "budget-exhausted", "mistyped": "invalid-configuration", "changed": "config-drift"}


class Seen:
    """Everything that `make up` starts, with flow runs that ended in every way a person meets."""

    def __init__(self, up: StartedUp) -> None:
        self.up = up
        launched = {
            "good": self.launch("good", 'overrides=["promotion.alias=champion"]'),
            "spent": self.launch("spent", 'overrides=["budgets.lost.retries=0"]', faults="kill@8"),
            "taken": self.launch("taken", faults="preempt@12"),
            "mistyped": self.launch("mistyped", 'overrides=["training.precision=fp99"]', name="mistyped"),
        }
        for flow_run_id in launched.values():
            self.wait_for_end(flow_run_id)
        self.wait_for_end(self.launch("good", "steps=80", name="changed"))
        wait_until(lambda: up.state("taken").finished is not None, "the continuation", up.output)
        self.wait_for_end(self.id_of("taken, attempt 2"))

    def launch(self, run_id: str, *parameters: str, faults: str = "", name: str = "") -> str:
        """Ask for a flow run of `train-gpt` and return its id."""
        words = [word for parameter in (f"run_id={run_id}", *parameters) for word in ("-p", parameter)]
        words += ["--job-variable", "env=" + json.dumps({"CAIRN_FAULTS": faults})] if faults else []
        words += ["--flow-run-name", name] if name else []
        given = ("deployment", "run", "train-gpt/train-gpt", "-p", f"config={self.up.config}", "--tag", "mine", *words)
        done = self.up.prefect(*given)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"UUID: ([0-9a-f-]{36})", done.stdout)[0]

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        return dict(self.up.ask(f"api/flow_runs/{flow_run_id}"))

    def wait_for_end(self, flow_run_id: str) -> None:
        wait_until(lambda: self.flow_run(flow_run_id)["state_type"] in ENDED, "the end of a flow run", self.up.output)

    def id_of(self, name: str) -> str:
        """Return the newest flow run of this name."""
        found = [item for item in self.up.flow_runs("train-gpt") if item["name"] == name]
        return str(max(found, key=lambda item: item["created"])["id"])

    def deployment(self, name: str) -> str:
        (found,) = [item["id"] for item in self.up.ask("api/deployments/filter", {}) if item["name"] == name]
        return str(found)

    def artifact(self, key: str) -> str:
        """Return the newest artifact of this key."""
        found = self.up.ask("api/artifacts/filter", {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC"})
        return str(found[0]["id"])


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with started_chromium() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, browser: "Browser") -> Iterator[Seen]:
    up = StartedUp(tmp_path_factory.mktemp("pages"), JOB_TEMPLATE="deployments/job-template-open.json")
    try:
        yield Seen(up)
    finally:
        up.stop(signal.SIGTERM)


@pytest.fixture(scope="module")
def page(browser: "Browser", seen: Seen) -> "Iterator[Page]":
    """A laptop's page, behind the password, that speaks to this machine alone."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.route(re.compile(r"^https?://(?!127\.0\.0\.1)"), lambda route: route.abort())
    page = context.new_page()
    page.set_default_timeout(2 * PAGE_MILLISECONDS)
    page.goto(seen.up.url, wait_until="domcontentloaded")
    field = page.locator("input[type=password]")
    field.fill(seen.up.password)
    field.press("Enter")
    page.get_by_text("Deployments", exact=True).first.wait_for(state="visible")
    assert "/v2/" in page.url  # the UI that a browser without a past is shown
    yield page
    context.close()


@pytest.fixture
def take(page: "Page", tmp_path: Path) -> Take:
    """Take a screenshot of what is shown."""
    folder = Path(os.environ.get("CAIRN_TEST_PICTURES") or tmp_path)

    def screenshot(name: str, *, whole: bool = True) -> None:
        page.evaluate("window.scrollTo(0, 0)")
        page.wait_for_timeout(500)  # charts move into their place
        picture = Image.open(BytesIO(page.screenshot(full_page=whole))).convert("RGB")
        picture.quantize(96).save(folder / f"{name}.png", optimize=True)  # a quarter of the bytes

    return screenshot


def go(page: "Page", seen: Seen, path: str) -> None:
    page.goto(f"{seen.up.url}/v2/{path}", wait_until="domcontentloaded")


def see(page: "Page", *words: str) -> None:
    for word in words:
        page.get_by_text(word, exact=True).first.wait_for(state="visible")


def press(page: "Page", button: "Locator", asks: str) -> None:
    """Press a button until it asks the server and is answered: a form whose error was just mended only looks again,
    and a loaded server's database may be locked.
    """
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request) if request.url.endswith(asks) else None)
    answered = HTTPStatus.SERVICE_UNAVAILABLE
    while answered == HTTPStatus.SERVICE_UNAVAILABLE:
        asked.clear()
        while not asked:
            button.click()
            page.wait_for_timeout(3000)
        response = asked[0].response()
        assert response is not None
        answered = HTTPStatus(response.status)


def press_resume(page: "Page") -> "Locator":
    """Open the form of a flow run that asks; returns it."""
    page.get_by_role("button", name="Open menu").first.click()
    page.get_by_role("menuitem", name="Resume").click()
    form = page.get_by_role("dialog")
    form.get_by_text("Approve", exact=True).wait_for(state="visible")
    return form


def test_the_page_of_the_deployment_lists_every_failure(page: "Page", seen: Seen, take: Take) -> None:
    go(page, seen, f"deployments/deployment/{seen.deployment('train-gpt')}")
    see(page, *FAILURES, *(f"reason:{reason}" for reason in FAILURES.values()), "taken, attempt 1", "taken, attempt 2")
    take("prefect-deployment")
    assert page.get_by_text("Failed", exact=True).count() == len(FAILURES)


def test_failed_in_the_list_of_runs_finds_every_failure_and_nothing_else(page: "Page", seen: Seen) -> None:
    go(page, seen, "runs")
    page.get_by_text("All run states").first.click()
    page.get_by_role("menuitem", name="Failed", exact=True).click()
    page.keyboard.press("Escape")
    see(page, f"{len(FAILURES)} Flow runs", *FAILURES)
    assert page.get_by_text("Completed", exact=True).count() == 0


def test_the_dashboard_counts_the_failures(page: "Page", seen: Seen) -> None:
    go(page, seen, "dashboard")
    see(page, "train-gpt", "cairn")
    failed = sum(item["state_type"] in ("FAILED", "CRASHED") for item in seen.up.flow_runs("train-gpt"))
    assert failed == len(FAILURES) + 1  # with the machine that was taken
    page.get_by_role("tab").filter(has_text=re.compile(rf"^{failed}$")).first.wait_for(state="visible")


def test_the_page_of_a_flow_run_names_run_attempt_and_tasks_with_every_character(page: "Page", seen: Seen) -> None:
    flow_run_id = seen.id_of("taken, attempt 1")
    go(page, seen, f"runs/flow-run/{flow_run_id}?tab=TaskRuns")
    rule = {"task_runs": {"flow_run_id": {"any_": [flow_run_id]}}}
    names = [item["name"] for item in seen.up.ask("api/task_runs/filter", rule)]
    assert any(name.startswith("train-segment ") for name in names) and all(name.isascii() for name in names)
    see(page, "taken, attempt 1", *names)


def test_the_continuation_has_the_tags_and_job_variables_of_the_launch(page: "Page", seen: Seen) -> None:
    first, second = (seen.flow_run(seen.id_of(f"taken, attempt {number}")) for number in (1, 2))
    assert "mine" in second["tags"] and second["job_variables"] == first["job_variables"] != {}
    go(page, seen, f"runs/flow-run/{second['id']}?tab=JobVariables")
    page.get_by_text("CAIRN_FAULTS").first.wait_for(state="visible")


def test_the_page_of_a_run_measures_its_best_checkpoint_under_another_suite_by_two_clicks(
    page: "Page", seen: Seen, take: Take
) -> None:
    go(page, seen, f"artifacts/artifact/{seen.artifact('cairn-taken')}")
    page.locator("img[alt='curves of taken']").wait_for(state="visible")
    take("prefect-run")
    page.get_by_role("link", name="repetition").click()
    field = page.get_by_label("Suite (Optional)", exact=True)
    field.wait_for(state="visible")
    assert page.url.startswith(f"{seen.up.url}/v2/deployments/")
    assert field.input_value() == "deployments/suites/repetition.toml"
    assert page.get_by_label("Checkpoint (Optional)", exact=True).input_value() == "taken@60"
    press(page, page.get_by_role("button", name="Submit"), "create_flow_run")
    wait_until(lambda: bool(seen.up.flow_runs("evaluate-promoted")), "the evaluation that was asked for")
    (asked,) = seen.up.flow_runs("evaluate-promoted")
    seen.wait_for_end(asked["id"])
    assert seen.flow_run(asked["id"])["state_name"] == "Completed"
    go(page, seen, f"artifacts/artifact/{seen.artifact('cairn-taken-evaluations')}")
    see(page, "checkpoint", "val_loss", "bits/byte")
    table = page.locator("table").first
    assert table.evaluate("table => table.scrollWidth <= table.closest('div').clientWidth")


def test_the_page_of_a_flow_run_begins_with_its_name_its_reason_and_the_graph(
    page: "Page", seen: Seen, take: Take
) -> None:
    go(page, seen, f"runs/flow-run/{seen.id_of('good, attempt 1')}")
    see(page, "good, attempt 1", "reason:completed", "run:good")
    page.wait_for_timeout(5000)  # the graph is drawn on a canvas
    take("prefect-flow-run", whole=False)


def test_the_form_has_typed_fields_and_says_in_words_what_is_wrong_before_a_run_exists(
    page: "Page", seen: Seen, take: Take
) -> None:
    before = len(seen.up.flow_runs("train-gpt"))
    go(page, seen, f"deployments/deployment/{seen.deployment('train-gpt')}/run")
    number = page.get_by_label("Steps (Optional)", exact=True)
    number.fill("30")
    assert number.get_attribute("type") == "number"
    page.get_by_label("Run id (Optional)", exact=True).fill("typed")
    page.get_by_label("Learning rate (Optional)", exact=True).fill("0.002")
    page.get_by_label("Micro-batch (Optional)", exact=True).fill("2")
    page.get_by_role("button", name="Add item").click()
    override = page.locator("textarea").last
    override.fill("training.stpes=1")
    press(page, page.get_by_role("button", name="Submit"), "create_flow_run")
    page.get_by_text("with a key that `cairn config` lists").first.wait_for(state="visible")
    take("prefect-form")
    assert len(seen.up.flow_runs("train-gpt")) == before
    override.fill("training.seed=7")
    page.get_by_label("Configuration (Optional)", exact=True).fill(str(seen.up.config))
    press(page, page.get_by_role("button", name="Submit"), "create_flow_run")
    wait_until(lambda: len(seen.up.flow_runs("train-gpt")) > before, "the run that was asked for")
    wait_until(lambda: seen.up.state("typed").finished is not None, "its end", seen.up.output)
    training = seen.up.state("typed").attempts[0].started.config["training"]
    assert [training[key] for key in ("steps", "lr", "micro_batch", "seed")] == [30, 0.002, 2, 7]


def test_a_promotion_is_approved_by_clicking_from_the_page_of_the_run(page: "Page", seen: Seen, take: Take) -> None:
    asks = '"promotion.require_approval=true", "promotion.alias=approved", "promotion.approval_timeout_seconds=3600"'
    flow_run_id = seen.launch("asking", f"overrides=[{asks}]")
    seen.wait_for_end(flow_run_id)
    go(page, seen, f"artifacts/artifact/{seen.artifact('cairn-asking')}")
    page.get_by_text("waits for approval until").first.wait_for(state="visible")
    page.get_by_role("link", name="Open the flow run").click()
    page.wait_for_url(f"{seen.up.url}/v2/runs/flow-run/{flow_run_id}*")
    form = press_resume(page)
    form.get_by_role("switch").click()
    form.locator("textarea").first.fill("ann")
    take("prefect-approval", whole=False)
    press(page, form.get_by_role("button", name="Resume", exact=True), "resume")
    registry = Registry(LocalStore(seen.up.folder / "store"), "approved")
    wait_until(lambda: registry.refresh().champion is not None, "the promotion", seen.up.output)
    champion = registry.state.champion
    assert champion is not None and (champion.run_id, champion.by) == ("asking", "ann")


def test_the_link_of_the_log_opens_the_form_in_the_other_ui(page: "Page", seen: Seen) -> None:
    """V1 is what Prefect's own links open; one password opens both."""
    asks = '"promotion.require_approval=true", "promotion.alias=linked", "promotion.approval_timeout_seconds=3600"'
    flow_run_id = seen.launch("linked", f"overrides=[{asks}]")
    seen.wait_for_end(flow_run_id)
    rule = {"logs": {"flow_run_id": {"any_": [flow_run_id]}}, "limit": 200}

    def links() -> list[str]:
        logged = [item["message"] for item in seen.up.ask("api/logs/filter", rule)]
        return [re.findall(r"http://\S+?(?=,)", line)[0] for line in logged if "waits for approval" in line]

    wait_until(lambda: bool(links()), "the question in the log", seen.up.output)
    page.goto(links()[0], wait_until="domcontentloaded")
    page.get_by_role("button", name="Resume").first.click()
    page.get_by_text("May linked point at linked@60?").first.wait_for(state="visible")
