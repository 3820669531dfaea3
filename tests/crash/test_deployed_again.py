"""A server that is set up again, on a real server: what a person has set stays, what the code changed arrives."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
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


def deploy(client: SyncPrefectClient, folder: Path) -> Deployed:
    """Deploy all, as the code has them."""
    made = Deployed(client, folder)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUpAgain:
    """Deployments of which a person has changed twenty settings: set up again, then with another code, then again."""

    deployed: Deployed
    before: Any
    unchanged: Any
    said: list[str]
    said_of_other_code: list[str]
    said_of_the_same: list[str]


@pytest.fixture(scope="module")
def again(client: SyncPrefectClient, tmp_path_factory: pytest.TempPathFactory) -> SetUpAgain:
    deployed = deploy(client, tmp_path_factory.mktemp("again"))
    set_twenty(deployed)
    before, said = deployed.everything(), deployed.set_up()
    unchanged = deployed.everything()
    deployed.item("train-gpt").update(description="Changed.", parameters={"config": "tiny", "steps": 7})
    deployed.item("watch-runs").update(tags=["changed"], schedules=[{"interval": 60}])
    deployed.item("tokenize-part").update(schedules=[{"interval": 60}], concurrency_limit={"limit": 2} | STRATEGY)
    for trigger in deployed.item("after-crash")["triggers"]:
        trigger["within"] = 99
    deployed.template["variables"]["properties"]["grace_seconds"] = {"type": "integer", "default": 7}
    return SetUpAgain(
        deployed=deployed,
        before=before,
        unchanged=unchanged,
        said=said,
        said_of_other_code=deployed.set_up(),
        said_of_the_same=deployed.set_up(),
    )


def test_twenty_settings_of_a_person_stay_when_the_server_is_set_up_again(again: SetUpAgain) -> None:
    assert again.unchanged == again.before
    assert {line for line in again.said if "stays" not in line} == set()
    kept = {line.split(": ")[0]: line.partition("has set it: ")[2] for line in again.said}
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


def test_a_change_of_the_code_arrives_and_leaves_the_settings_of_a_person(again: SetUpAgain) -> None:
    assert [line for line in again.said_of_other_code if "changed by the code" in line] == [
        "deployment train-gpt/train-gpt: changed by the code: parameters.steps",
        "deployment tokenize-part/tokenize-part: changed by the code: "
        "concurrency_limit, concurrency_options, schedules",
        "deployment watch-runs/watch-runs: changed by the code: tags",
        "deployment watch-runs/after-crash: changed by the code: automation cairn: continue what crashed",
    ]
    assert not [line for line in again.said_of_the_same if "changed by the code" in line]
    deployed = again.deployed
    own, before = deployed.deployment("train-gpt"), again.before["deployments"]["train-gpt" + deployed.own]
    assert settled(own) == {**before, "parameters": {**before["parameters"], "steps": 7}}
    watching, crashed = deployed.deployment("watch-runs"), deployed.automations()["crashed"]
    assert (watching["tags"], watching["schedules"][0]["active"]) == (["changed"], False)
    assert (crashed["enabled"], crashed["trigger"]["within"]) == (False, 99.0)
    assert deployed.automations()["silent"]["trigger"]["within"] == 600.0


@pytest.fixture(scope="module")
def narrowed(client: SyncPrefectClient, tmp_path_factory: pytest.TempPathFactory) -> tuple[Deployed, list[str]]:
    """A server of which a person deleted something, set up with a flow of fewer parameters; and what that said."""
    deployed = deploy(client, tmp_path_factory.mktemp("narrowed"))
    deployed.ask("DELETE", f"/automations/{deployed.automations()['silent']['id']}")
    deployed.change("watch-runs", schedules=[])
    deployed.ask("DELETE", f"/deployments/{deployed.deployment('sweep-checkpoints')['id']}")
    deployed.change("tokenize-part", parameters={"part": 2, "store_credentials": "team"})
    entrypoint = "tests.crash.test_deployed_again.narrower"
    deployed.item("tokenize-part").update(entrypoint=entrypoint, parameters={"dry_run": True})
    return deployed, deployed.set_up()


def test_what_a_person_deleted_of_a_deployment_stays_deleted_and_a_deleted_deployment_is_made_again(
    narrowed: tuple[Deployed, list[str]],
) -> None:
    deployed, said = narrowed
    assert list(deployed.automations()) == ["crashed"] and deployed.deployment("watch-runs")["schedules"] == []
    assert "deployment sweep-checkpoints/sweep-checkpoints: made" in said and deployed.deployment("sweep-checkpoints")


def test_a_parameter_that_the_flow_has_no_more_is_removed_whoever_set_it(
    narrowed: tuple[Deployed, list[str]],
) -> None:
    parameters = narrowed[0].deployment("tokenize-part")["parameters"]
    assert parameters == {"store_credentials": "team", "dry_run": True}


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
