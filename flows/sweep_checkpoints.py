"""The flow `sweep-checkpoints`: apply retention to every run of a store; safe beside trainers and other sweeps."""

import time
from collections import Counter
from random import Random

from prefect import flow, get_run_logger

from cairn.flows.operations.store_sweep import StoreSweepRow, SweepOutcome, sweep_store
from cairn.flows.orchestrator import deployments, flow_run, known_stores
from cairn.storage.snapshots.data_snapshot import sweep_parts
from cairn.storage.stores.open_store import open_store
from cairn.tasks.policy.termination import FlowEnd


@flow(name="sweep-checkpoints", retries=0, validate_parameters=True, persist_result=False)
@flow_run.as_prefect_state
def sweep_checkpoints(
    store: deployments.Store = "",
    store_credentials: deployments.Credentials = "",
    dry_run: deployments.DryRun = False,
    most_seconds: deployments.MostSeconds = 900.0,
) -> FlowEnd:
    """Apply each run's own retention to all runs, also to finished ones, and delete orphans and old parts.

    Args:
        store: folder or URL of the object store; empty: CAIRN_STORE, else ./cairn-store, and all of deployed runs.
        store_credentials: name of a block `Cairn store credentials`; empty: those of the worker.
        dry_run: report what would be deleted and change nothing.
        most_seconds: after this time no further run is started; each sweep starts at a random run.
    """
    logger, until = get_run_logger(), time.monotonic() + most_seconds

    def sweep(url: str) -> tuple[StoreSweepRow, ...]:
        swept, left = open_store(url), until - time.monotonic()
        rows = sweep_store(swept, dry_run=dry_run, most_seconds=left, random=Random(), monotonic=time.monotonic)
        for row in rows:
            if row.why or row.superseded or row.freed_bytes:
                done = f"{row.superseded} superseded, {row.freed_bytes:,} bytes"
                logger.info("%s: %s: %s %s", row.run_id, row.action, done, row.why)
        if not dry_run:
            sweep_parts(swept)
        return rows

    rows = known_stores.visit_stores(store, store_credentials, sweep, logger.warning)
    counts = ", ".join(f"{action} {count}" for action, count in sorted(Counter(row.action for row in rows).items()))
    total = f"{sum(row.freed_bytes for row in rows):,} bytes {'would be freed' if dry_run else 'freed'}"
    failed = [f"{row.run_id}: {row.why}" for row in rows if row.action == SweepOutcome.FAILED]
    message = "; ".join([counts or "no runs", total, *failed])
    return FlowEnd(reason="sweep-failed", message=message) if failed else flow_run.completed(message)
