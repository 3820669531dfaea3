"""`make up` in a real browser: its own page works with the password, every other page can do nothing."""

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from tests.deployments.started_up import StartedUp

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.linux, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("up")]
# Quick witnesses: test_guarded_server.py and test_job_templates.py beside this file.
ATTACK = """async ([url, mode, type]) => {
    try {
        const sent = {method: "POST", mode, headers: {"Content-Type": type}, body: "{}"};
        const answer = await fetch(url, sent);
        return answer.status;
    } catch (error) {
        return String(error);
    }
}"""


@pytest.fixture
def foreign_origin(tmp_path: Path) -> Iterator[str]:
    """A page of somebody else's, on another port of this machine."""
    (tmp_path / "index.html").write_text("<html>cats</html>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://evil.example:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("ui", ["/v2", ""])
def test_each_ui_asks_for_the_password_and_then_shows_the_deployments(up: StartedUp, page: "Page", ui: str) -> None:
    page.goto(f"{up.url}{ui}/deployments", wait_until="domcontentloaded")
    field = page.locator("input[type=password]")
    field.wait_for(state="visible")
    field.fill(up.password)
    field.press("Enter")
    page.get_by_text("train-gpt").first.wait_for(state="visible")  # lists are POSTs, so this one had a CSRF token


def test_a_page_of_a_foreign_origin_starts_no_run(up: StartedUp, page: "Page", foreign_origin: str) -> None:
    found = up.ask("api/deployments/filter", {})
    (deployment,) = [item["id"] for item in found if item["name"] == "train-gpt"]
    before = len(up.flow_runs("train-gpt"))
    page.goto(foreign_origin)
    for host in ("127.0.0.1", "localhost", "evil.example"):
        url = f"http://{host}:{up.port}/api/deployments/{deployment}/create_flow_run"
        for mode, content_type in (("cors", "application/json"), ("cors", "text/plain"), ("no-cors", "text/plain")):
            assert page.evaluate(ATTACK, [url, mode, content_type]) in (0, "TypeError: Failed to fetch")
    assert len(up.flow_runs("train-gpt")) == before


def test_a_page_whose_name_was_bound_to_this_machine_is_not_served(up: StartedUp, page: "Page") -> None:
    answer = page.goto(f"http://evil.example:{up.port}/")
    assert answer is not None and answer.status == 400
    assert page.evaluate("async () => (await fetch('/api/health')).status") == 400
