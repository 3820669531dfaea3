"""Of a set of runs, the next trainer is started once this run's has trained, beside its last evaluations."""

from pathlib import Path

import pytest

from tests.wiring.flow_in_process import FlowWorld, NotedWarmTrainer


class Noting(NotedWarmTrainer):
    """Notes the committed steps whenever a trainer is started."""

    def __init__(self, flow: FlowWorld) -> None:
        super().__init__()
        self._flow = flow
        self.starts: list[list[str]] = []

    def start(self, work_dir: Path) -> None:
        committed = self._flow.log.state.live_checkpoints
        self.starts.append([str(record.committed.step) for record in committed])


@pytest.mark.parametrize(("is_of_set", "expected"), [(True, [["10", "20"]]), (False, [])])
def test_the_trainer_of_the_next_run_is_started_once_this_one_has_trained(
    flow: FlowWorld, is_of_set: bool, expected: list[list[str]]
) -> None:
    warm = Noting(flow)
    warm.is_of_set = is_of_set
    flow.train(warm=warm)
    assert warm.starts[2:] == expected, "after those of its own: when the run is opened, and when it is claimed"
