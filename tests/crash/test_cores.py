"""The same command ends with the same bits on one core and on two, idle and busy, and cores are no devices."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHORT = ("training.steps=12", "training.micro_batch=1", "model.dropout=0.0", "evaluation.every_commits=100")


def train(folder: Path, api_url: str, *overrides: str, cores: int | None = None) -> Command:
    """Run the command to its end, on so many cores."""
    folder.mkdir()
    command = Command(folder, api_url)
    process = command.start(*(word for one in (*SHORT, *overrides) for word in ("--set", one)))
    if cores is not None:
        psutil.Process(process.pid).cpu_affinity(list(range(cores)))
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    return command


@contextmanager
def busy() -> Iterator[None]:
    """Every core computes something else meanwhile."""
    others = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(psutil.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_neither_cores_nor_workers_nor_processes_nor_load_change_a_bit(tmp_path: Path, api_url: str) -> None:
    ways: dict[str, tuple[str, ...]] = {
        "as the machine is": (),
        "one worker": ("training.workers=1",),
        "four workers": ("training.workers=4",),
        "two processes of two workers": ("training.processes=2", "training.workers=2"),
    }
    found = {name: train(tmp_path / name, api_url, *overrides).state_sha256() for name, overrides in ways.items()}
    found["one core"] = train(tmp_path / "one core", api_url, cores=1).state_sha256()
    with busy():
        found["busy"] = train(tmp_path / "busy", api_url).state_sha256()
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("processes", [1, 2])
def test_gpu_seconds_count_a_run_on_cpus_as_one_device(tmp_path: Path, api_url: str, processes: int) -> None:
    command = train(tmp_path / "run", api_url, f"training.processes={processes}")
    (attempt,) = command.state().attempts
    assert attempt.ended is not None and attempt.ended_at is not None
    assert 0 < attempt.ended.gpu_seconds <= (attempt.ended_at - attempt.started_at).total_seconds()
