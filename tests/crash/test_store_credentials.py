"""A block with a store's credentials: the deployment that names it reaches the store; nobody else is told them.

Quick witnesses: the parameter in tests/deployments/test_deployment_forms.py, the variables in test_run_on_s3.py.
"""

import uuid

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.flows.orchestrator.server_setup import StoreCredentials
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.s3_store import S3Store
from tests.crash.leaks import found_in, told_by
from tests.crash.prefect_api import Prefect, flow_runs, launch, work
from tests.crash.training_command import Command
from tests.s3.servers import BUCKET, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECRETS = {"access_key_id": "AKIAcanaryblock00001", "secret_access_key": "canary/block+secret/02"}


@pytest.fixture
def block(api_url: str, emulator: S3Server) -> str:
    """A block that leads to the emulator, which lets everybody in who has any key."""
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    with temporary_settings({PREFECT_API_URL: api_url}):
        StoreCredentials(**SECRETS, endpoint_url=emulator.endpoint, region="us-east-1").save(name)  # type: ignore[arg-type]
    return name


@pytest.mark.usefixtures("deployed")
def test_a_worker_without_credentials_trains_in_the_store_of_the_block_and_tells_them_to_nobody(
    command: Command, api_url: str, prefect: Prefect, emulator: S3Server, block: str
) -> None:
    prefix = uuid.uuid4().hex
    url = f"s3://{BUCKET}/{prefix}"
    launch(prefect, command, store=url, store_credentials=block)
    work(prefect)
    (flow_run,) = [item for item in flow_runs(api_url, "train-gpt") if item["parameters"].get("store") == url]
    assert flow_run["state_name"] == "Completed", flow_run["state"]["message"]
    state = RunLog(S3Store(emulator.bucket(), prefix), "run").refresh()
    assert state.finished is not None
    assert found_in(told_by(api_url), SECRETS) == []
    written = [path for path in command.folder.rglob("*") if path.is_file()]
    assert {str(path): names for path in written if (names := found_in(path.read_bytes(), SECRETS))} == {}


@pytest.mark.usefixtures("deployed")
def test_a_block_that_is_not_there_is_named_with_what_to_do(command: Command, api_url: str, prefect: Prefect) -> None:
    launch(prefect, command, store=str(command.folder / "store"), store_credentials="nobodys")
    work(prefect)
    found = [item for item in flow_runs(api_url, "train-gpt") if item["state_name"] == "Failed"]
    (failed,) = [item for item in found if item["parameters"].get("store_credentials") == "nobodys"]
    message = failed["state"]["message"]
    assert message.startswith("invalid-configuration: store_credentials nobodys: ") and "block register" in message
