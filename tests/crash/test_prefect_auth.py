"""A Prefect server that asks for a password: a run that gives it works, any other is refused in one line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.prefect_server import Server
from tests.crash.training_command import Command, configuration
from tests.processes.waiting import patience_seconds

pytestmark = pytest.mark.slow
PASSWORD = "admin:canary-of-auth"


@pytest.fixture(scope="module")
def guarded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = Server(tmp_path_factory.mktemp("guarded"), PREFECT_SERVER_API_AUTH_STRING=PASSWORD)
    yield server.url
    server.stop()


def trained(folder: Path, api_url: str, **environment: str) -> tuple[int, str]:
    command = Command(folder, api_url, environment=environment)
    (folder / "run.toml").write_text(configuration(steps=5, every_commits=1))
    return command.start().wait(timeout=patience_seconds()), command.output()


def test_a_run_that_gives_the_password_works_and_does_not_repeat_it(guarded_url: str, tmp_path: Path) -> None:
    code, printed = trained(tmp_path, guarded_url, PREFECT_API_AUTH_STRING=PASSWORD)
    assert (code, "canary" in printed) == (0, False), printed


@pytest.mark.parametrize("given", ["", "admin:another"])
def test_a_run_that_does_not_is_refused_in_one_line_and_claims_nothing(
    guarded_url: str, tmp_path: Path, given: str
) -> None:
    code, printed = trained(tmp_path, guarded_url, PREFECT_API_AUTH_STRING=given)
    refused = [line for line in printed.splitlines() if line.startswith("cairn: ")]
    assert (code, len(refused), "Traceback" in printed) == (2, 1, False), printed
    assert "set PREFECT_API_AUTH_STRING" in refused[0] and not (tmp_path / "store" / "runs").exists()


def test_a_run_with_a_server_of_its_own_and_a_password_for_it_works(tmp_path: Path) -> None:
    code, printed = trained(tmp_path, "", PREFECT_SERVER_API_AUTH_STRING=PASSWORD)
    assert (code, "canary" in printed) == (0, False), printed
