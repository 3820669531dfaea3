"""`evaluate-promoted` as `make up` deploys it: run by a real worker, it trains nothing and adds a row."""

import pytest

from tests.crash.prefect_api import Prefect, flow_runs, run_page, work
from tests.crash.training_command import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SUITE = """
batches = 2
batch_size = 8
sample_tokens = 4
[[evaluators]]
name = "count"
command = ["python", "-c", "import os, sys; print('{\\"files\\": %d}' % len(os.listdir(sys.argv[1])))"]
"""


@pytest.mark.usefixtures("deployed")
def test_the_champion_is_measured_under_a_file_by_a_worker_and_nothing_is_trained(
    command: Command, api_url: str, prefect: Prefect
) -> None:
    command.train()
    suite = command.folder / "suite.toml"  # a relative path would start where `deploy` was run
    suite.write_text(SUITE)
    before = command.state()
    run = ("deployment", "run", "evaluate-promoted/evaluate-promoted", "-p", "reference=champion")
    prefect(*run, "-p", f"suite={suite}")
    work(prefect)
    after = command.state()
    [flow_run] = flow_runs(api_url, "evaluate-promoted")
    assert flow_run["state_name"] == "Completed", flow_run["state"]["message"]
    new = after.evaluations[len(before.evaluations) :]
    assert [(item.step, item.suite) for item in new] == [(60, "held-out"), (60, "count")]
    assert after.attempts == before.attempts
    # What was superseded may be deleted meanwhile: the worker also takes a scheduled sweep that is due.
    assert [r.committed for r in after.checkpoints] == [r.committed for r in before.checkpoints]
    assert "| this | bard@60 | recorded | count" in run_page(api_url, flow_run["id"])
