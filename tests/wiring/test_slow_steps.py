"""A run whose steps become slow says so once, and once more when they are as quick as before."""

import pytest

from cairn.flows.run.attempt_trainer import AttemptTrainer
from cairn.flows.run.run_start import claim_next_attempt
from tests.entries import step_record
from tests.wiring.flow_in_process import FlowWorld

SLOW = "  warning: training runs at 100 tokens/s, 10% of its own median of 1,000"


@pytest.mark.parametrize(
    ("threads", "crowded"),
    [(1, ""), (2, "; its 2 threads wait for each other where others use the {cores} cores")],
)
def test_slow_steps_are_said_once_with_crowded_threads_as_a_cause_and_so_is_their_end(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch, threads: int, crowded: str
) -> None:
    said = list[str]()
    with flow.opened(f"training.threads={threads}") as run:
        started = claim_next_attempt(run)
        trainer = AttemptTrainer(run, started)
        monkeypatch.setattr(run, "say", said.append)
        for step, rate in enumerate([*[1000.0] * 30, *[100.0] * 12, *[1000.0] * 3], 1):
            trainer._note_step(step_record(step, 1, tokens_per_second=rate, seconds=3.0))
    assert said == [SLOW + crowded.format(cores=started.placement.cores), "  step 43: back to 1,000 tokens/s"]
