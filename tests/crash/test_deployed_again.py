"""A server that is set up again, on a real server: what a person has set stays, what the code changed arrives."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate

from cairn.flows.orchestrator.deployments import compare, digests
from cairn.flows.orchestrator.server_setup import set_up
from tests.crash.prefect_api import ROOT, Prefect

pytestmark = pytest.mark.xdist_group("deployment-steps")  # the block type is the whole server's
STRATEGY = {"collision_strategy": "CANCEL_NEW"}
ALWAYS_NEW = {"created", "updated", "id", "status", "last_polled", "next_run", "anchor_date"}


class Deployed:
    """The deployments of a prefect.yaml under names, and on a pool, of this test's own."""

    def __init__(self, client: SyncPrefectClient, folder: Path, prefect_file: str = "prefect.yaml") -> None:
        self.client, self.own, self.file = client, f"-{uuid4().hex[:8]}", folder / "prefect.yaml"
        self.pool = f"pool{self.own}"
        self.code: dict[str, Any] = yaml.safe_load((ROOT / prefect_file).read_text(encoding="utf-8"))
        self.template = json.loads((ROOT / "deployments" / "job-template-open.json").read_text(encoding="utf-8"))
        for item in self.code["deployments"]:
            item["name"] += self.own
            item["work_pool"] = {**item["work_pool"], "name": self.pool}

    def item(self, name: str) -> dict[str, Any]:
        """Return what the file says of a deployment, to be changed."""
        (found,) = [item for item in self.code["deployments"] if item["name"] == name + self.own]
        changed: dict[str, Any] = found
        return changed

    def set_up(self) -> list[str]:
        """Set the server up as the file and the template are now."""
        self.file.write_text(yaml.safe_dump(self.code))
        pool = WorkPoolCreate(name=self.pool, type="process", base_job_template=self.template)
        said: Sequence[str] = asyncio.run(set_up(pool, self.file, accelerators=None, alert_block=""))
        return [line.replace(self.own, "") for line in said]

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Ask the API as a person's script does."""
        answer = self.client.request(method, path, json=body)  # type: ignore[arg-type]
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def deployment(self, name: str) -> dict[str, Any]:
        """Return what the server has of a deployment."""
        (found,) = self.ask("POST", "/deployments/filter", {"deployments": {"name": {"any_": [name + self.own]}}})
        return dict(found)

    def change(self, name: str, **fields: object) -> None:
        """Change a deployment as a page of Prefect's does."""
        self.ask("PATCH", f"/deployments/{self.deployment(name)['id']}", fields)

    def automations(self) -> dict[str, dict[str, Any]]:
        """Return the automations of `after-crash`, by the last word of their names."""
        owner = f"prefect.deployment.{self.deployment('after-crash')['id']}"
        found = self.ask("GET", f"/automations/related-to/{owner}")
        return {item["name"].split()[-1]: item for item in found}

    def everything(self) -> Any:
        """Return all that the server has of it, but ids, times and statuses."""
        names = {"deployments": {"name": {"any_": [item["name"] for item in self.code["deployments"]]}}}
        queues = self.ask("POST", f"/work_pools/{self.pool}/queues/filter", {})
        return settled(
            {
                "deployments": {item["name"]: item for item in self.ask("POST", "/deployments/filter", names)},
                "automations": self.automations(),
                "queues": {queue["name"]: queue for queue in queues},
                "pool": self.ask("GET", f"/work_pools/{self.pool}"),
            }
        )


def settled(answer: Any) -> Any:
    """Return an answer of the API without what is new in each."""
    if isinstance(answer, dict):
        return {key: settled(value) for key, value in answer.items() if key not in ALWAYS_NEW}
    return [settled(item) for item in answer] if isinstance(answer, list) else answer


@pytest.fixture
def deployed(client: SyncPrefectClient, tmp_path: Path) -> Deployed:
    """All deployments, as the code has them."""
    made = Deployed(client, tmp_path)
    assert not [line for line in made.set_up() if "stays" in line or "changed" in line]
    return made


def set_twenty(deployed: Deployed) -> None:
    """Change twenty settings as a person does."""
    deployed.change("train-gpt", parameters={"config": "ours", "store_credentials": "team"}, tags=["cairn", "ours"])
    queue = {"work_pool_name": deployed.pool, "work_queue_name": "evaluate"}  # other pools have one of this name
    deployed.change("train-gpt", description="Ours.", job_variables={"env": {"A": "b"}}, **queue)
    deployed.change("train-set", paused=True, tags=[])
    deployed.change("sweep-checkpoints", paused=True, parameters={"store": "s3://ours/cairn", "dry_run": True})
    every_day = {"schedule": {"cron": "0 4 * * *", "timezone": "Europe/Berlin"}, "active": True}
    deployed.change("sweep-checkpoints", schedules=[every_day])
    deployed.change("watch-runs", concurrency_limit=3, concurrency_options={"collision_strategy": "ENQUEUE"})
    watching = deployed.deployment("watch-runs")
    schedule = f"/deployments/{watching['id']}/schedules/{watching['schedules'][0]['id']}"
    deployed.ask("PATCH", schedule, {"active": False})
    deployed.change("evaluate-promoted", parameters={"reference": "best", "suite": "", "store": ""})
    crashed, silent = deployed.automations()["crashed"], deployed.automations()["silent"]
    deployed.ask("PATCH", f"/automations/{crashed['id']}", {"enabled": False})
    changed = {**silent, "trigger": {**silent["trigger"], "within": 600}, "description": "Ours."}
    written = {key: value for key, value in changed.items() if key not in ("id", "created", "updated")}
    deployed.ask("PUT", f"/automations/{silent['id']}", written)
    for queue, fields in {"train": {"priority": 7}, "evaluate": {"concurrency_limit": 2}}.items():
        deployed.ask("PATCH", f"/work_pools/{deployed.pool}/queues/{queue}", fields)
    template = json.loads(json.dumps(deployed.template))
    template["variables"]["properties"]["ours"] = {"type": "string", "default": ""}
    deployed.ask("PATCH", f"/work_pools/{deployed.pool}", {"concurrency_limit": 5, "base_job_template": template})


def test_twenty_settings_of_a_person_stay_when_the_server_is_set_up_again(deployed: Deployed) -> None:
    set_twenty(deployed)
    before = deployed.everything()
    said = deployed.set_up()
    assert deployed.everything() == before
    assert {line for line in said if "stays" not in line} == set()
    kept = {line.split(": ")[0]: line.partition("has set it: ")[2] for line in said}
    assert kept == {
        "work pool pool": "job template",
        "deployment train-gpt/train-gpt": "description, job_variables, parameters.config, "
        "parameters.store_credentials, tags, work_queue_name",
        "deployment train-set/train-set": "paused, tags",
        "deployment watch-runs/watch-runs": "concurrency_limit, concurrency_options, schedules",
        "deployment watch-runs/after-crash": "automation cairn: continue what went silent, "
        "automation cairn: continue what crashed (off)",
        "deployment sweep-checkpoints/sweep-checkpoints": "parameters.dry_run, parameters.most_seconds, "
        "parameters.store, paused, schedules",
        "deployment evaluate-promoted/evaluate-promoted": "parameters.again, parameters.reference",
    }


def test_a_change_of_the_code_arrives_and_leaves_the_settings_of_a_person(deployed: Deployed) -> None:
    set_twenty(deployed)
    before = deployed.deployment("train-gpt")
    deployed.item("train-gpt").update(description="Changed.", parameters={"config": "tiny", "steps": 7})
    deployed.item("watch-runs").update(tags=["changed"], schedules=[{"interval": 60}])
    deployed.item("tokenize-part").update(schedules=[{"interval": 60}], concurrency_limit={"limit": 2} | STRATEGY)
    for trigger in deployed.item("after-crash")["triggers"]:
        trigger["within"] = 99
    deployed.template["variables"]["properties"]["grace_seconds"] = {"type": "integer", "default": 7}
    said = deployed.set_up()
    assert [line for line in said if "changed by the code" in line] == [
        "deployment train-gpt/train-gpt: changed by the code: parameters.steps",
        "deployment tokenize-part/tokenize-part: changed by the code: "
        "concurrency_limit, concurrency_options, schedules",
        "deployment watch-runs/watch-runs: changed by the code: tags",
        "deployment watch-runs/after-crash: changed by the code: automation cairn: continue what crashed",
    ]
    after = deployed.deployment("train-gpt")
    assert settled(after) == settled({**before, "parameters": {**before["parameters"], "steps": 7}})
    watching, crashed = deployed.deployment("watch-runs"), deployed.automations()["crashed"]
    assert (watching["tags"], watching["schedules"][0]["active"]) == (["changed"], False)
    assert (crashed["enabled"], crashed["trigger"]["within"]) == (False, 99.0)
    assert deployed.automations()["silent"]["trigger"]["within"] == 600.0
    assert not [line for line in deployed.set_up() if "changed by the code" in line]


def test_what_a_person_deleted_of_a_deployment_stays_deleted_and_a_deleted_deployment_is_made_again(
    deployed: Deployed,
) -> None:
    deployed.ask("DELETE", f"/automations/{deployed.automations()['silent']['id']}")
    deployed.change("watch-runs", schedules=[])
    deployed.ask("DELETE", f"/deployments/{deployed.deployment('tokenize-part')['id']}")
    said = deployed.set_up()
    assert list(deployed.automations()) == ["crashed"] and deployed.deployment("watch-runs")["schedules"] == []
    assert "deployment tokenize-part/tokenize-part: made" in said and deployed.deployment("tokenize-part")


def test_a_parameter_that_the_flow_has_no_more_is_removed_whoever_set_it(deployed: Deployed) -> None:
    deployed.change("tokenize-part", parameters={"part": 2, "store_credentials": "team"})
    item = deployed.item("tokenize-part")
    item.update(entrypoint="tests.crash.test_deployed_again.narrower", parameters={"dry_run": True})
    deployed.set_up()
    assert deployed.deployment("tokenize-part")["parameters"] == {"store_credentials": "team", "dry_run": True}


@flow(name="tokenize-part")
def narrower(store_credentials: str = "", dry_run: bool = False) -> None:
    """The flow with other parameters."""


def test_settings_of_which_nothing_is_known_stay_and_what_is_missing_is_added() -> None:
    changes = compare({}, {"tags": ["a"], "entrypoint": "old"}, {"tags": ["b"], "entrypoint": "new", "paused": False})
    assert (changes.written, changes.removed, changes.kept) == ({"entrypoint", "paused"}, set(), ["tags"])


def test_what_the_code_has_no_more_is_removed_unless_a_person_changed_it() -> None:
    changes = compare(digests({"a": 1, "b": 1}), {"a": 1, "b": 2}, {})
    assert (changes.written, changes.removed, changes.kept) == (set(), {"a"}, ["b"])


@pytest.mark.slow  # test_twenty_settings... beside it is the quick one
@pytest.mark.parametrize("prefect_file", ["prefect.yaml", "deployments/kubernetes/prefect.yaml"])
def test_what_is_deployed_is_what_prefects_own_command_deploys(
    client: SyncPrefectClient, tmp_path: Path, prefect: Prefect, prefect_file: str
) -> None:
    ours = Deployed(client, tmp_path, prefect_file)
    template = ROOT / Path(prefect_file).parent / "job-template.json"
    ours.template = json.loads((template if template.exists() else ROOT / "deployments/job-template.json").read_text())
    ours.set_up()
    before = ours.everything()
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(ours.file))
    after = ours.everything()
    different = {
        key
        for name, deployment in after["deployments"].items()
        for key in deployment
        if deployment[key] != before["deployments"][name][key]
    }
    assert different == set()
    assert after == before
