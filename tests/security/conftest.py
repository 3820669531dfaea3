"""A run to look at from outside, as a user starts it, and a browser for what a page may do."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.commands import cairn
from tests.crash.chromium import PAGE_MILLISECONDS, started_chromium
from tests.crash.prefect_server import shared_server
from tests.crash.training_command import Command
from tests.deployments.started_up import StartedUp
from tests.processes.forked_parsers import forked_parsers

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["cairn", "forked_parsers"]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """A fresh folder to train in, with the session's Prefect server."""
    return Command(tmp_path, shared_server())


@pytest.fixture
def command_with_own_server(tmp_path: Path) -> Command:
    """A fresh folder to train in; each command starts a Prefect server of its own."""
    return Command(tmp_path, "")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedUp]:
    """Everything `make up` starts for an operator who has set nothing."""
    started = StartedUp(tmp_path_factory.mktemp("up"))
    yield started
    started.stop(signal.SIGTERM)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A browser for which a stranger's name is this machine's, as after DNS rebinding."""
    with started_chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as chromium:
        yield chromium


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    """A fresh page."""
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PAGE_MILLISECONDS)
    yield page
    context.close()
