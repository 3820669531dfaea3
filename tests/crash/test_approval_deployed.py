"""A deployment's flow run that asks a person is suspended: its process is gone, the answer starts it from the top."""

import pytest

from cairn.storage.logs.registry import Registry
from tests.crash.approval import answer, offering
from tests.crash.prefect_api import Prefect, flow_runs, launch, log_of, run_page, work
from tests.crash.training_command import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("deployed")
def test_a_deployed_run_leaves_its_machine_while_a_person_thinks(
    command: Command, api_url: str, prefect: Prefect
) -> None:
    overrides = [word for word in offering("champion") if word != "--set"]
    launch(prefect, command, run_id="bard", store=str(command.folder / "store"), overrides=overrides)
    work(prefect)
    here = command.store.url  # as its start has written it; other tests' flow runs are on the same server
    (asking,) = [item for item in flow_runs(api_url, "train-gpt") if item["parameters"].get("store") == here]
    assert asking["state_name"] == "Suspended"
    assert Registry(command.store, "champion").refresh().history == ()
    question = "may champion point at bard@60? It waits for approval until 20"
    assert question in (log := log_of(api_url, asking["id"])) and "Traceback" not in log
    assert f"/runs/flow-run/{asking['id']}, or `cairn promote bard@60`" in log
    page = run_page(api_url, asking["id"])
    assert "**May `champion` point at `bard@60`? It waits for approval until 20" in page
    assert f"](../../runs/flow-run/{asking['id']})" in page
    answer(api_url, asking["id"], approve=True, by="ann", why="it rhymes")
    work(prefect)
    champion = command.champion()
    assert champion is not None and (champion.by, champion.step) == ("ann", 60)
    assert len(command.state().attempts) == 1
    assert "waits for approval" not in run_page(api_url, asking["id"])
    assert log_of(api_url, asking["id"]).count(question) == 1
