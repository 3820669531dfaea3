"""The parent's side of a trainer: whatever becomes of its listener or of the child, no wait is without a limit."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.storage.errors import StoreUnavailable
from cairn.storage.logs.step_log import StepRecord
from cairn.tasks.attempt.watchdog import HangDetector
from cairn.tasks.configuration.settings import DivergenceConfig, WatchdogConfig
from cairn.tasks.errors import TrainerGone
from cairn.tasks.policy.failures import ErrorKind, ExceptionReport
from cairn.tasks.trainer import trainer_process
from cairn.tasks.trainer.trainer_process import TrainerChild, TrainerProcess, tail_of
from cairn.tasks.trainer.trainer_protocol import StepDone, TrainerSpec, encode_message
from tests.entries import NOON, step_record

STEP = step_record(1, 1, at=NOON)
LIVES_ON = "import sys, time; sys.stdin.readline(); print({line!r}, end='', flush=True); time.sleep(600)"
CLOSES = "import os, time; os.close(1); time.sleep(600)"


@pytest.fixture
def children() -> Iterator[list[TrainerChild]]:
    started: list[TrainerChild] = []
    yield started
    for child in started:
        child.discard()


def start(folder: Path, code: str, children: list[TrainerChild]) -> TrainerProcess:
    spec = TrainerSpec(
        run_id="bard", attempt=1, store_url=str(folder), snapshot_id="s", data=DataConfig(sources=("t",)),
        model=ModelConfig(), training=TrainingConfig(steps=9, global_batch=4), micro_batch=4,
        activation_checkpointing=False, quarantined=(), divergence=DivergenceConfig(), patience_seconds=1.0,
        threads=1, workers=1, devices=1, resume=None, cache_dir=folder, work_dir=folder,
    )  # fmt: skip
    children.append(TrainerChild(folder, (sys.executable, "-S", "-c", code)))

    def refuse(record: StepRecord) -> None:
        raise StoreUnavailable(f"step {record.step} could not be shown")

    detector = HangDetector(WatchdogConfig())
    return TrainerProcess(spec, children[0], on_step=refuse, on_waiting=lambda waiting: None, detector=detector)


def said(step: StepRecord) -> str:
    return encode_message(StepDone(record=step, tokens=1, gpu_seconds=1.0)).decode()


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (said(STEP), ErrorKind.UNAVAILABLE, "step 1 could not be shown"),
        ("no message\n", ErrorKind.BUG, "trainer protocol: not a message: b'no message\\n'"),
    ],
    ids=["its callback raises", "a line that is no message"],
)
def test_a_living_child_ends_with_its_listener_and_with_its_error_as_the_reason(
    tmp_path: Path, children: list[TrainerChild], line: str, kind: ErrorKind, message: str
) -> None:
    trainer = start(tmp_path, LIVES_ON.format(line=line), children)
    with pytest.raises(TrainerGone):
        trainer.wait_ready()
    assert trainer.reap() == -9
    report = trainer.received.newest(ExceptionReport)
    assert report is not None and (report.kind, report.message) == (kind, message)


def test_a_line_that_a_kill_cut_off_is_no_error(tmp_path: Path, children: list[TrainerChild]) -> None:
    trainer = start(
        tmp_path,
        "input(); print('{\"kind\": \"Ste', end='', flush=True); import os; os.kill(os.getpid(), 9)",
        children,
    )
    with pytest.raises(TrainerGone):
        trainer.wait_ready()
    assert (trainer.reap(), trainer.received.newest(ExceptionReport)) == (-9, None)


def test_a_child_that_hangs_in_its_exit_is_killed_when_its_time_is_over(
    tmp_path: Path, children: list[TrainerChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "_EXIT_SECONDS", 0.1)
    trainer = start(tmp_path, CLOSES, children)
    with pytest.raises(TrainerGone):
        trainer.wait_ready()
    assert trainer.is_alive and trainer.reap() == -9


def test_of_gigabytes_of_complaints_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("wb") as file:
        file.truncate(2**40)
        file.seek(0, 2)
        file.write(b"\nlast but one\nlast \xff words\n")
    assert tail_of(path, lines=2) == ("last but one", "last \N{REPLACEMENT CHARACTER} words")


def test_a_short_or_absent_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "stderr").write_bytes(b"one\ntwo\n")
    assert (tail_of(tmp_path / "stderr"), tail_of(tmp_path / "none")) == (("one", "two"), ())
