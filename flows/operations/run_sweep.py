"""The verb `sweep`: a run by its name, with the policy its newest attempt was configured with.

Owns where the policy comes from. Refuses to know what retention means, and the orchestrator.
"""

from reports.queries.run_lookup import configuration_of, find_run
from storage.checkpoints.sweep import SweepReport
from storage.stores.object_store import ObjectStore
from tasks.checkpoints.checkpoint_sweep import sweep_run
from tasks.evaluator.evaluation_suite import suite_of


def sweep_one(store: ObjectStore, run_id: str, *, dry_run: bool) -> SweepReport:
    """Sweep the run, or say what a sweep would do; raises `RunNotFound`, or `IntegrityError` with nothing deleted."""
    log = find_run(store, run_id)
    configuration = configuration_of(log.state)
    return sweep_run(log, configuration.checkpoint, suite_of(configuration.evaluation).sha256, dry_run=dry_run)
