"""The live page in a real Chromium beside a real run that is killed while the page is open, and goes on."""

import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.crash.chromium import PAGE_MILLISECONDS
from tests.crash.training_command import RUN, STEPS, Command
from tests.crash.victims import kill_both
from tests.fabricated_run import fabricate
from tests.processes.waiting import patience_seconds, wait_for, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.xdist_group("live-page")  # one page is ended for three tests
USUAL = (
    "Applying inline style",  # decorative attributes of the plotting library, which the policy blocks
    "Failed to load resource",  # a server that is away
)


class LivePage:
    """`cairn ui` as a person starts it, on any port that is free."""

    def __init__(self, command: Command) -> None:
        self.process = command.start_verb("ui", "--port", "0")
        wait_for(lambda: "Ctrl-C" in command.output(), self.process, "an address", command.output)
        self.url, self._token = re.findall(r"(http://127\.0\.0\.1:\d+)/(\?token=\S+)", command.output())[0]

    def at(self, path: str) -> str:
        """Return an address as a person opens it."""
        return f"{self.url}{path}{self._token.replace('?', '&' if '?' in path else '?')}"

    def interrupt(self) -> int:
        """Press Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=patience_seconds())


@pytest.fixture
def live(command: Command) -> Iterator[LivePage]:
    command.store.create("a-store", b"")  # a folder that is there, as after a first run
    page = LivePage(command)
    yield page
    page.process.kill()
    page.process.wait()


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    """A page that fails the test where its script fails."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.set_default_timeout(4 * PAGE_MILLISECONDS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    yield page
    context.close()
    assert [line for line in wrong if not any(usual in line for usual in USUAL)] == []


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedPage:
    """What a page that nobody asked has left, its code after Ctrl-C, and how a second one at its port ended."""

    packs: list[Path]
    code: int
    second_code: int
    second_said: str


@pytest.fixture(scope="module")
def ended(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> EndedPage:
    command = Command(tmp_path_factory.mktemp("page"), api_url)
    fabricate(command.store, "bard").start()
    live, tables = LivePage(command), command.folder / "cache" / "tables"
    wait_for(lambda: any(tables.rglob("pack.json")), live.process, "packed rows", command.output)
    packs = list(tables.rglob("pack.json"))
    second = command.start_verb("ui", "--port", live.url.rpartition(":")[2])
    second_code = second.wait(timeout=patience_seconds())
    return EndedPage(packs=packs, code=live.interrupt(), second_code=second_code, second_said=command.output())


def test_ctrl_c_ends_it_with_0(ended: EndedPage) -> None:
    assert ended.code == 0


def test_the_runs_are_read_before_anybody_asks(ended: EndedPage) -> None:
    assert ended.packs


def test_a_port_that_is_taken_is_refused_in_one_line(ended: EndedPage) -> None:
    assert ended.second_code == 2
    assert re.fullmatch(r"cairn: --port \d+: .*; choose another one, or 0 for any that is free\n", ended.second_said)


def wait_for_step(page: "Page", step: int) -> None:
    """Wait until the plot shows a step."""
    shown = "Math.max(...(document.querySelector('[data-canvas]').data || []).flatMap(item => item.x || []))"
    wait_until(lambda: page.evaluate(shown) >= step, f"step {step} on the plot")


@pytest.mark.slow  # quick witness: tests/cairn/ui/test_live_page.py
@pytest.mark.timeout(1200)
def test_a_run_that_is_killed_while_it_is_looked_at_is_shown_to_its_end_and_has_the_same_bits(
    command: Command, live: LivePage, page: "Page", undisturbed_sha256: str
) -> None:
    page.goto(live.at("/"))
    page.get_by_text("No runs here yet").wait_for()
    training = command.train_until(23)
    page.get_by_role("link", name=RUN).click()  # which came by itself
    page.locator(".state.s-running").wait_for()
    wait_for_step(page, 23)
    page.get_by_text("The curve as numbers").click()
    kill_both(training)
    page.locator(".state.s-interrupted").wait_for()
    numbers = page.locator("details[open] > summary", has_text="The curve as numbers")
    assert numbers.count() == 1, "what a reader opened stays open"
    second = command.start()
    while second.poll() is None:
        page.reload()
        page.locator(".state").first.wait_for()
    assert second.wait() == 0, command.output()
    page.locator(".state.s-finished").wait_for()
    wait_for_step(page, STEPS)
    page.locator(".legendtext", has_text="lost × 1").wait_for()
    page.get_by_role("link", name="explain attempt 1").first.click()
    page.locator(".answer", has_text="Attempt 1 of 2").wait_for()
    assert command.state_sha256() == undisturbed_sha256


@pytest.mark.slow  # quick witness: tests/cairn/ui/test_live_page.py
@pytest.mark.timeout(600)
def test_a_store_and_a_server_that_go_away_are_told_and_come_back_without_a_hand(
    command: Command, live: LivePage, page: "Page", undisturbed: Command
) -> None:
    folder = command.folder / "store"
    subprocess.run(["cp", "-r", f"{undisturbed.folder}/store/.", folder], check=True)
    page.goto(live.at(f"/runs/{RUN}"))
    page.locator(".state.s-finished").wait_for()
    folder.rename(command.folder / "away")
    page.get_by_text("The store cannot be read now").wait_for()
    assert page.locator(".state.s-finished").is_visible(), "what was last read stays"
    (command.folder / "away").rename(folder)
    page.get_by_text("The store cannot be read now").wait_for(state="detached")
    live.interrupt()
    page.get_by_text("cairn ui does not answer").wait_for(state="visible")


@pytest.mark.slow  # quick witness: tests/cairn/ui/test_live_page.py
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [390, 800, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_its_window_and_is_used_by_keyboard(
    browser: "Browser", live: LivePage, command: Command, undisturbed: Command, width: int, scheme: str, tmp_path: Path
) -> None:
    subprocess.run(["cp", "-r", f"{undisturbed.folder}/store/.", command.folder / "store"], check=True)
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(4 * PAGE_MILLISECONDS)
    for path in ("/", f"/runs/{RUN}", f"/runs/{RUN}/attempts/1", f"/compare?run={RUN}", "/models"):
        page.goto(live.at(path))
        page.locator("main h1").wait_for()
        wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= room, path
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.goto(live.at("/"))
    page.get_by_label("Search").focus()
    page.keyboard.type("nobody")
    page.get_by_text("No run matches").wait_for()
    assert page.get_by_label("Search").evaluate("item => item === document.activeElement"), "focus stays"
    for _ in "nobody":
        page.keyboard.press("Backspace")
    page.get_by_role("checkbox", name=f"compare {RUN}").press("Space")
    page.get_by_role("button", name="Compare the chosen runs").press("Enter")
    page.wait_for_url(f"{live.url}/compare?run={RUN}")
    context.close()
