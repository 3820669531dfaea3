"""What a person does with one committed checkpoint: measure it.

Owns how these follow from the run's own log: its configuration, its data, its suite. Imports torch and the
orchestrator only in the function that needs them.
"""

import os

from flows.run_lookup import FoundCheckpoint, configuration_of
from flows.work_folder import work_folder
from storage.run_entries import EvaluationFailed, EvaluationRecorded


def measure(found: FoundCheckpoint) -> EvaluationRecorded | EvaluationFailed:
    """Evaluate under the run's own suite; what is already on record is not measured again."""
    from flows.evaluation_planning import plan_evaluation
    from tasks.evaluation_run import record_evaluation
    from tasks.this_machine import usable_cores

    config = configuration_of(found.log.state)
    threads = config.training.threads or usable_cores()
    plan = plan_evaluation(config, found.opened.data_snapshot, work_folder(os.environ), threads=threads)
    return record_evaluation(found.log, found.reference, plan)
