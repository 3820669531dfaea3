"""The Prefect task `sweep-checkpoints`: retention of one run beside its training."""

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from cairn.storage.checkpoints.sweep import SweepReport
from cairn.storage.errors import StorageError
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.settings import CheckpointConfig


@task(name="sweep-checkpoints", task_run_name="sweep-checkpoints {moment}", cache_policy=NO_CACHE, persist_result=False)
def sweep_checkpoints(log: RunLog, policy: CheckpointConfig, suite_sha256: str, *, moment: str) -> SweepReport | None:
    """Sweep the run once; logs a storage error and returns None, because the next sweep completes it."""
    try:
        report = sweep_run(log, policy, suite_sha256)
    except StorageError as error:
        get_run_logger().warning("the sweep %s stopped, the next one continues: %s", moment, error)
        return None
    if report.freed_bytes:
        get_run_logger().info("the sweep %s freed %s bytes", moment, f"{report.freed_bytes:,}")
    return report
