"""The flow `watch-runs`: continue every run whose owner is gone or whose back-off is over; idempotent."""

from collections import Counter

from prefect import flow, get_run_logger

from cairn.flows.orchestrator import deployments, flow_run, known_stores
from cairn.flows.watching.run_watcher import WatchRow, open_watcher
from cairn.tasks.policy import run_watch, termination


@flow(name="watch-runs", retries=0, validate_parameters=True, persist_result=False)
@flow_run.as_prefect_state
def watch_runs(
    store: deployments.Store = "",
    store_credentials: deployments.Credentials = "",
    deployment: deployments.Deployment = "train-gpt/train-gpt",
) -> termination.FlowEnd:
    """Poll all runs once and continue those that must be, through their deployment.

    Args:
        store: folder or URL of the object store; empty: CAIRN_STORE, else ./cairn-store, and all of deployed runs.
        store_credentials: name of a block `Cairn store credentials`; empty: those of the worker.
        deployment: flow/deployment whose flow runs continue the runs; empty: a process of this machine does.
    """
    logger = get_run_logger()

    def poll(url: str) -> tuple[WatchRow, ...]:
        watcher = open_watcher(url, deployment)
        with watcher.delivering_notices(logger.warning):
            polled = watcher.poll_patiently()
        for row in polled:
            logger.info("%s: %s: %s %s", row.run_id, row.action, row.why, row.how)
        return polled

    rows = known_stores.visit_stores(store, store_credentials, poll, logger.warning)
    counts = ", ".join(f"{action} {count}" for action, count in sorted(Counter(row.action for row in rows).items()))
    continued = ", ".join(row.run_id for row in rows if row.action == run_watch.WatchAction.CONTINUED)
    return flow_run.completed(f"{counts or 'no runs'}{f'; continued: {continued}' if continued else ''}")
