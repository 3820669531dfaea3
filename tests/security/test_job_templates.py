"""What a flow run may choose of its own process, as Prefect's own worker and server read our job templates."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from prefect.utilities.schema_tools import ValidationError, validate
from prefect.workers.base import BaseJobConfiguration
from prefect.workers.process import ProcessJobConfiguration

FOLDER = Path(__file__).parents[2] / "deployments"
PROCESS, OPEN, KUBERNETES = "job-template.json", "job-template-open.json", "kubernetes/job-template.json"
ENGINE = "python -P -m cairn.flows.orchestrator.prefect_settings prefect.engine"
CHOSEN: dict[str, Any] = {"command": "touch ran", "env": {"LD_PRELOAD": "theirs.so"}}


def template(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return read


def rendered(kind: type[BaseJobConfiguration], name: str) -> BaseJobConfiguration:
    """Return what the worker makes of a flow run that chooses command and environment."""
    no_api: Any = object()  # asked only for blocks, which the templates name none of
    return asyncio.run(kind.from_template_and_values(template(name), CHOSEN, client=no_api))


@pytest.mark.parametrize("name", [PROCESS, KUBERNETES])
@pytest.mark.parametrize("variable", ["command", "env", "working_dir", "args"])
def test_a_flow_run_that_chooses_its_command_or_environment_is_refused_by_the_server(name: str, variable: str) -> None:
    with pytest.raises(ValidationError):
        validate({variable: CHOSEN.get(variable, "x")}, template(name)["variables"], raise_on_error=True)


THEIRS: dict[str, Any] = {
    "image": "theirs/miner:1",
    "namespace": "kube-system",
    "service_account_name": "theirs-admin",
    "secret": "prefect-server-theirs",
    "cluster_config": {"config": {"server": "theirs"}, "context_name": "theirs"},
    "labels": {"app": "theirs-prefect-server"},  # by which network.yaml lets pods reach the database
    "annotations": {"theirs": "x"},
}


@pytest.mark.parametrize("variable", THEIRS)
def test_a_flow_run_chooses_no_image_no_account_no_secret_and_no_place_in_a_cluster(variable: str) -> None:
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    chosen, no_api = {variable: THEIRS[variable]}, cast(Any, object())
    with pytest.raises(ValidationError):
        validate(chosen, template(KUBERNETES)["variables"], raise_on_error=True)
    kind = KubernetesWorkerJobConfiguration
    made = asyncio.run(kind.from_template_and_values(template(KUBERNETES), chosen, client=no_api))
    assert "theirs" not in made.model_dump_json() and "kube-system" not in made.model_dump_json()


@pytest.mark.parametrize("name", [PROCESS, KUBERNETES])
def test_where_one_is_accepted_all_the_same_the_worker_ignores_it(name: str) -> None:
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

    kinds: dict[str, type[BaseJobConfiguration]] = {
        PROCESS: ProcessJobConfiguration,
        KUBERNETES: KubernetesWorkerJobConfiguration,
    }
    made = rendered(kinds[name], name)
    assert made.command == (ENGINE if name == PROCESS else None)
    assert "LD_PRELOAD" not in str(made) and "touch ran" not in str(made)


def test_a_worker_starts_a_flow_run_that_imports_nothing_of_its_folder_and_reads_no_settings_there() -> None:
    """Prefect's own command puts the worker's folder first on the path, and reads `prefect.toml` and `.env`."""
    no_api: Any = object()
    for name in (PROCESS, OPEN):
        made = asyncio.run(ProcessJobConfiguration.from_template_and_values(template(name), {}, client=no_api))
        assert made.command == ENGINE


def test_the_open_template_lets_it_choose_both() -> None:
    made = rendered(ProcessJobConfiguration, OPEN)
    assert (made.command, made.env) == (CHOSEN["command"], CHOSEN["env"])


def test_the_open_template_differs_in_nothing_else() -> None:
    closed, opened = template(PROCESS)["job_configuration"], template(OPEN)["job_configuration"]
    assert opened == {**closed, "command": "{{ command }}", "env": "{{ env }}"}
