"""README's section about Prefect, as it is printed: each line is typed in the shell beside a `make up`."""

import signal
from pathlib import Path

import pytest

from cairn.storage.logs.registry import Registry
from cairn.storage.stores.local_store import LocalStore
from tests.commands import ROOT
from tests.deployments.started_up import StartedUp
from tests.documented_commands import documented_commands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("up")]
# Quick witness: tests/house/test_documented_commands.py, which holds the lines against the flows' parameters.


def test_every_deployment_that_readme_runs_completes_and_leaves_a_measured_champion(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in documented_commands(text) if line.words[0] == "prefect" and not line.is_in_sentence]
    assert [line.words[3] for line in lines] == ["train-gpt/train-gpt", "evaluate-promoted/evaluate-promoted"]
    up = StartedUp(tmp_path)
    try:
        for line in lines:
            ended = up.prefect(*line.words[1:], "--watch", "--watch-interval", "1")
            assert ended.returncode == 0, ended.stdout + ended.stderr + up.output()
        champion = Registry(LocalStore(tmp_path / "store"), "champion").refresh().champion
        state = up.state("first-try")
        assert champion is not None and (champion.run_id, champion.step) == ("first-try", 200)
        suites = {item.suite for item in state.evaluations if item.step == champion.step}
        assert "repetition" in suites and len(suites) > 1
        (measured,) = up.flow_runs("evaluate-promoted")
        assert (measured["name"], measured["state_name"]) == ("evaluate champion", "Completed")
    finally:
        up.stop(signal.SIGTERM)
