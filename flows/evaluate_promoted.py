"""The flow `evaluate-promoted`: measure a committed checkpoint, by default the champion, and compare it with others."""

import os
from contextlib import suppress
from uuid import UUID

from prefect import flow, get_client, get_run_logger, runtime
from prefect.client.schemas.actions import ArtifactCreate

from cairn.flows.operations.checkpoint_operations import plan_checkpoint
from cairn.flows.orchestrator import deployments, flow_run, flow_run_tags, run_overview, server_setup
from cairn.flows.run.steps import Chain
from cairn.reports.queries import evaluations, run_lookup
from cairn.storage.stores.open_store import open_store
from cairn.tasks.configuration.addresses import choose_store
from cairn.tasks.evaluate import Interrupted, evaluate
from cairn.tasks.evaluator.evaluation_run import Measurement
from cairn.tasks.policy.termination import FlowEnd


@flow(name="evaluate-promoted", retries=0, persist_result=False)
@flow_run.as_prefect_state
def evaluate_promoted(
    reference: deployments.Reference = "champion",
    suite: deployments.Suite = "",
    store: deployments.Store = "",
    store_credentials: deployments.Credentials = "",
    again: deployments.Again = False,
) -> FlowEnd:
    """Measure a committed checkpoint under its run's suites or a suite file; what is on record is not measured again.

    Args:
        reference: an alias such as champion, RUN, or RUN@STEP.
        suite: path of a suite file (TOML); empty: the suites of the checkpoint's run.
        store: folder or URL of the object store; empty: CAIRN_STORE, else ./cairn-store.
        store_credentials: name of a block `Cairn store credentials`; empty: those of the worker.
        again: measure also what is on record, and add a second row.
    """
    flow_run_tags.introduce(f"evaluate {reference}")
    logger = get_run_logger()
    server_setup.take_credentials(store_credentials, os.environ)
    found = run_lookup.find_checkpoint(open_store(choose_store(store, os.environ)), reference)
    measure = Chain().as_task(evaluate)
    ended = [
        measure(Measurement(reference=found.reference, plan=one, again=again, on_request=True), found.log)
        for one in plan_checkpoint(found, suite).all
    ]
    view = evaluations.compare_evaluations(found, [one for one in ended if not isinstance(one, Interrupted)])
    words = "; ".join(
        f"{item.suite} of {view.run_id}@{view.step}: "
        + (item.detail or ", ".join(f"{name} {value:.4g}" for name, value in sorted(item.metrics.items())[:8]))
        for item in (row.evaluation for row in view.rows if row.role == "this")
    )
    with suppress(Exception), get_client(sync_client=True) as client:  # an API that fails costs the table in the UI
        own_id, key = UUID(runtime.flow_run.get_id()), run_overview.artifact_key(view.run_id, "evaluations")
        flow_run_tags.set_tags(client, client.read_flow_run(own_id), (f"run:{view.run_id}",))
        form_links = run_overview.find_evaluation_form(client, runtime.flow_run.get_parameters())
        page = run_overview.evaluation_markdown(view, words, form_links)
        about = f"step {view.step} of run {view.run_id} beside others under the same suites"
        new = ArtifactCreate(key=key, type="markdown", description=about, data=page, flow_run_id=own_id)
        client.create_artifact(new)
    logger.info("%s", words)
    return FlowEnd(reason="evaluator-failed", message=words) if view.status == "failed" else flow_run.completed(words)
