"""A checkpoint of which one byte has changed: whoever reads it says so, and the run goes on from the one before."""

import pytest

from tests.crash.reference import reference_run
from tests.crash.training_command import Command
from tests.crash.victims import kill_both
from tests.processes.waiting import wait_for

SETTINGS = ("--set", "training.steps=15", "--set", "budgets.storage.backoff_seconds=0.1")


# quicker: tests/storage/test_resume_point.py, "quarantine-and-resume" in tests/protocol, and test_rank_resume.py
@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "writer", "architecture"),
    [(1, "", "gpt2"), (1, "", "qwen3"), (2, "-writer-2-of-2", "qwen3")],
)
def test_a_changed_byte_is_found_by_the_trainer_that_loads_it_and_costs_one_checkpoint(
    command: Command, processes: int, writer: str
) -> None:
    settings = (*SETTINGS, "--set", f"training.processes={processes}")
    process = command.train_until(12, *settings)
    wait_for(lambda: command.state().resume_step == 10, process, "the commit of step 10", command.output)
    kill_both(process)
    damaged = command.state().readable[0].committed
    key = f"{damaged.prefix}/optimizer{writer}-00001-of-00001.safetensors"
    data = bytearray(command.store.read(key))
    data[-5] ^= 1
    command.store.write(key, bytes(data))
    command.train(*settings)
    state = command.state()
    assert (damaged.step, command.reasons()) == (10, ["lost", "storage", "completed"])
    resumed = [attempt.started.resumed_from for attempt in state.attempts]
    assert [reference.step for reference in resumed if reference] == [10, 5]
    quarantined = next(record for record in state.checkpoints if record.committed == damaged)
    assert [(item.key, item.reads) for item in quarantined.evidence] == [(key, 3)]
    assert command.state_sha256() == reference_run(command).state_sha256
