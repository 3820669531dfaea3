"""A checkpoint of which one byte has changed: whoever reads it says so, and the run goes on from the one before."""

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from cairn.storage.logs.run_entries import CheckpointCommitted
from cairn.tasks.machine.process_scopes import running_beside
from cairn.ui.local_server import serve_metrics
from tests.crash.reference import reference_run
from tests.crash.training_command import Command
from tests.crash.victims import kill_both
from tests.processes.waiting import wait_for
from tests.reports.tracking_server import tracking_server
from tests.reports.webhook import serving_hook

SETTINGS = ("--set", "training.steps=15", "--set", "budgets.storage.backoff_seconds=0.1")


# quicker: test_resume_point.py, "quarantine-and-resume" in tests/protocol, and test_rank_resume.py
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
    damaged, key = damage_newest(command, writer)
    command.train(*settings)
    state = command.state()
    assert (damaged.step, command.reasons()) == (10, ["lost", "storage", "completed"])
    resumed = [attempt.started.resumed_from for attempt in state.attempts]
    assert [reference.step for reference in resumed if reference] == [10, 5]
    quarantined = next(record for record in state.checkpoints if record.committed == damaged)
    assert [(item.key, item.reads) for item in quarantined.evidence] == [(key, 3)]
    assert command.state_sha256() == reference_run(command).state_sha256


@pytest.mark.slow
def test_a_hanging_webhook_exporters_and_scrapes_change_no_bit(command: Command, tmp_path: Path) -> None:
    process = command.train_until(12, *SETTINGS)
    wait_for(lambda: command.state().resume_step == 10, process, "the commit of step 10", command.output)
    kill_both(process)
    damage_newest(command)  # the quarantine is told, and so the webhook hangs while the rest is trained
    with tracking_server() as tracking, serving_hook() as hook, scraping(serve_metrics(command.store, 0)):
        hook.hangs = True
        command.train(
            *SETTINGS,
            *("--set", f"exporters.tensorboard={tmp_path / 'board'}", "--set", f"exporters.mlflow={tracking.url}"),
            *(("--set", f"exporters.wandb={tmp_path / 'wandb'}") if find_spec("wandb") else ()),
            CAIRN_NOTIFY__WEBHOOK=hook.url,
        )
        assert hook.arrived.is_set() and tracking.runs and list((tmp_path / "board").rglob("*tfevents*"))
    assert command.state_sha256() == reference_run(command).state_sha256


def damage_newest(command: Command, writer: str = "") -> tuple[CheckpointCommitted, str]:
    """Change one byte of what a writer has of the newest checkpoint; return that, and the object that is damaged."""
    damaged = command.state().readable[0].committed
    key = f"{damaged.prefix}/optimizer{writer}-00001-of-00001.safetensors"
    data = bytearray(command.store.read(key))
    data[-5] ^= 1
    command.store.write(key, bytes(data))
    return damaged, key


@contextmanager
def scraping(address: str) -> Iterator[None]:
    """Ask for the metrics twice a second while the block runs."""

    def scrape(stop: threading.Event) -> None:
        while not stop.wait(0.5):
            with urllib.request.urlopen(address) as answer:
                answer.read()

    with running_beside(scrape, name="scrapes"):
        yield
