"""A real Prefect server for real `cairn train` runs, the run nobody touched, and one that met every fault."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cairn.storage.stores.s3_store import S3Store
from tests.crash.chromium import started_chromium
from tests.crash.deployed_run import client, flow_run, launch, log
from tests.crash.prefect_api import JOB_TEMPLATE, Prefect, cancel_waiting_flow_runs, prefect_command
from tests.crash.prefect_server import copy_untouched_database, shared_server
from tests.crash.session_runs import scarred_run, undisturbed_run
from tests.crash.training_command import Command
from tests.log_judge import judge_store
from tests.s3.fault_proxy import FaultProxy
from tests.s3.servers import S3Server, s3_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["client", "flow_run", "launch", "log"]


@pytest.fixture(scope="session")
def api_url() -> str:
    """The address of a real Prefect server on a free port of the loopback, one for the whole session."""
    return shared_server()


@pytest.fixture
def architecture() -> str:
    """The network of `command` and of the run nobody touched, which a test can be parametrized by."""
    return "gpt2"


@pytest.fixture
def command(tmp_path: Path, api_url: str, architecture: str) -> Command:
    """A fresh folder to train in."""
    return Command(tmp_path, api_url, architecture=architecture)


@pytest.fixture
def alone(tmp_path: Path) -> Command:
    """A command that is told of no server; its own has no tables to make."""
    copy_untouched_database(tmp_path)
    return Command(tmp_path, "")


@pytest.fixture
def prefect(command: Command, api_url: str) -> Prefect:
    """The `prefect` command, as `make up` uses it, for this test's store."""
    return prefect_command(command, api_url)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests with a worker follow each other: each would take, and cancel, another one's flow runs."""
    for item in items:
        if "deployed" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("deployed"))


@pytest.fixture
def deployed(prefect: Prefect, api_url: str) -> Iterator[None]:
    """The work pool and all deployments; no flow run is left that the next test's worker would take."""
    prefect("work-pool", "create", "cairn", "--type", "process", "--base-job-template", JOB_TEMPLATE, "--overwrite")
    prefect("--no-prompt", "deploy", "--all")
    yield
    cancel_waiting_flow_runs(api_url)


@pytest.fixture(scope="session")
def undisturbed(api_url: str) -> Command:
    """The run nobody touched, made once a session and not to be changed."""
    return undisturbed_run(api_url)


@pytest.fixture
def undisturbed_sha256(api_url: str, architecture: str) -> str:
    """The digest of the run nobody touched."""
    return undisturbed_run(api_url, architecture).state_sha256()


@pytest.fixture(scope="session")
def scarred(api_url: str) -> Command:
    """The run that met every fault, made once a session and not to be changed."""
    return scarred_run(api_url)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A headless Chromium that is installed here."""
    with started_chromium() as chromium:
        yield chromium


@pytest.fixture
def emulator(tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """The emulator, which never goes away itself and lets anybody in."""
    return s3_server("quick", tmp_path_factory.getbasetemp())


@pytest.fixture
def proxy(emulator: S3Server) -> Iterator[FaultProxy]:
    """What stands between a run and its store."""
    with FaultProxy(upstream=emulator.endpoint) as standing:
        yield standing


@pytest.fixture
def remote(tmp_path: Path, api_url: str, emulator: S3Server, proxy: FaultProxy) -> Iterator[Command]:
    """A command whose store is behind the proxy; the test itself reads past it, and so does the judge of its logs."""
    store = S3Store(emulator.bucket(), uuid.uuid4().hex)
    yield Command(tmp_path, api_url, store=store, environment=emulator.environment(proxy.endpoint))
    judge_store(store)
