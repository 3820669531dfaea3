"""The run's deployment and its worker, as `make up` has them: a process pool of the run's own, so that what is left of
one run's flow runs is never taken by the worker of another.

Owns registering, starting the worker and asking for a flow run. Refuses to know what is done to any of it.
"""

import subprocess
from collections.abc import Mapping

from tests.crash.prefect_api import JOB_TEMPLATE, launch, prefect_command, start_beside
from tests.crash.training_command import Command

DEPLOYMENT = "train-gpt/train-gpt"


class Deployed:
    """Everything of one run that Prefect starts."""

    def __init__(self, command: Command, api_url: str, environment: Mapping[str, str]) -> None:
        """Register pool and deployment; the worker is started by `keep_working`."""
        self._command, self._environment = command, dict(environment)
        self._pool = f"chaos-{command.folder.name}"
        self._prefect = prefect_command(command, api_url)
        self._prefect(
            "work-pool", "create", self._pool, "--type", "process", "--base-job-template", JOB_TEMPLATE, "--overwrite"
        )
        named = ("--name", "train-gpt", "--pool", self._pool)
        self._prefect("--no-prompt", "deploy", *named)
        self._worker: subprocess.Popen[bytes] | None = None

    def ask_for_flow_run(self, run_id: str, store: str) -> None:
        """Create a flow run that opens the run."""
        launch(self._prefect, self._command, run_id=run_id, store=store)

    def keep_working(self) -> None:
        """Start the worker where none is at work."""
        if self._worker is not None and self._worker.poll() is None:
            return
        words = ("prefect", "worker", "start", "--pool", self._pool, "--name", "chaos", "--install-policy", "never")
        self._worker = start_beside(self._command, self._environment, "worker", *words)

    def end(self) -> None:
        """End the worker; flow runs under way go on."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            self._worker = None
