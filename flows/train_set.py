"""The flow `train-set`: start a run for each combination of values as a flow run of `train-gpt`; it waits for none."""

import os

from prefect import exceptions, flow, task
from prefect.deployments import run_deployment

from cairn.flows.orchestrator import deployments, flow_run, run_overview
from cairn.flows.preparation.training_request import TrainingRequest, choose_run_id
from cairn.tasks.configuration.configuration_source import SetMember, expand_set, read_configuration
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.termination import FlowEnd


@flow(name="train-set", retries=0, validate_parameters=True, persist_result=False)
@flow_run.as_prefect_state
def train_set(
    config: deployments.Config = "quickstart",
    name: deployments.RunId = "",
    overrides: deployments.SetOverrides = (),
    store: deployments.Store = "",
    store_credentials: deployments.Credentials = "",
    deployment: deployments.Deployment = "train-gpt/train-gpt",
) -> FlowEnd:
    """Start a run for each combination of the overrides' values; `cairn compare NAME` compares them.

    Args:
        config: run configuration (TOML) of all of them: a name in deployments/, a path, or a URL.
        name: name of the set, such as rates; its runs are rates.lr=0.001 and so on. Empty: the configuration's name.
        overrides: `section.key=value,value` on top of the configuration, one each.
        store: folder or URL of the object store; empty: CAIRN_STORE, else the configuration's, else ./cairn-store.
        store_credentials: name of a block `Cairn store credentials`; empty: those of the worker.
        deployment: flow/deployment whose flow runs train the runs.
    """
    members = expand_set(choose_run_id(TrainingRequest(config=config, run_id=name)), overrides)
    for member in members:  # a value that no run could be made with is refused before the first one starts
        if read_configuration(config, overrides=member.overrides, environment=os.environ).set.is_on:
            why = "this flow starts all runs at once, so none can wait for a rung or a budget"
            raise InvalidConfiguration(f"[set] of {config}: {why}; leave it out, or use `cairn train`")
    given = {"config": config, "store": store, "store_credentials": store_credentials}
    started = start_run.map(list(members), given=[given] * len(members), deployment=[deployment] * len(members))
    started.result()
    return flow_run.completed(f"{len(members)} runs started: {', '.join(member.run_id for member in members)}")


@task(name="start-run", task_run_name="start {member.run_id}", persist_result=False)
def start_run(member: SetMember, given: dict[str, str], deployment: str) -> None:
    """Create the flow run of one run of the set; `InvalidConfiguration` if there is no such deployment."""
    parameters = {**given, "run_id": member.run_id, "overrides": list(member.overrides)}
    name = run_overview.flow_run_name(member.run_id, 1)
    try:
        run_deployment(deployment, parameters=parameters, flow_run_name=name, timeout=0)
    except exceptions.ObjectNotFound as error:
        problem = "Prefect does not know it; `prefect deploy` registers flow/deployment"
        raise InvalidConfiguration(f"deployment {deployment!r}: {problem}") from error
