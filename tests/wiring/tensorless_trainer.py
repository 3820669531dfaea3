"""A trainer without tensors (`python -m tests.wiring.tensorless_trainer`): speaks the protocol and stages real objects.

It trains nothing, so it starts in half a second. What it was sent stands in `attempt-NNNN.heard` of its work folder.
`--die-at N` ends it by SIGKILL after step N, `--deaf` makes it ignore SIGTERM and hang before its first step,
`--first-loss L` lets the losses it reports fall from there. `--linger` makes it stay when it is told to finish, and
write the file `finished-before-its-trainer` if the run is finished while it does. `--slow-upload N` leaves the upload
of step N under way until it is told to wait for it; `--stop-parent` sends its parent SIGTERM where that shows.
`--once KIND@N,…` disturbs the run after step N, in one attempt only: preempt, kill, lose-rank, or the kind of an error.
`--leave-at N` ends the segment of step N there, as if another machine had a notice, and drops its checkpoint once.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cairn.storage.checkpoints.checkpoint import TensorGroup, checkpoint_target, stage_checkpoint
from cairn.storage.checkpoints.payload import TensorRecord, TrainerDocument
from cairn.storage.errors import StorageError
from cairn.storage.logs.log_entry import DevicePeak
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.logs.run_log import RunLog, run_prefix
from cairn.storage.logs.run_members import MembersChanged
from cairn.storage.logs.step_log import StepLog, StepRecord
from cairn.storage.stores.open_store import open_store
from cairn.tasks.policy.failures import ErrorKind, ExceptionReport, kind_of
from cairn.tasks.trainer.trainer_protocol import (
    CheckpointDropped,
    Event,
    Ready,
    SegmentDone,
    StepDone,
    TrainerSpec,
    TrainUntil,
    decode_message,
    encode_message,
)

STEP_TOKENS, STEP_GPU_SECONDS, TOKENS_PER_SECOND = 7, 0.25, 1000.0
PEAK = DevicePeak(flops=6e12, source="data sheet")


FIRST_LOSS = 5.0


def loss_of(step: int, first: float = FIRST_LOSS) -> float:
    """Return the train loss that is reported for a step."""
    return first - step / 100


def heard_by(work_dir: Path, attempt: int) -> Path:
    """Return the file of everything that the trainer of an attempt was sent."""
    return work_dir / f"attempt-{attempt:04d}.heard"


def main() -> None:
    """Serve one attempt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--first-loss", type=float, default=FIRST_LOSS)
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--linger", action="store_true")
    parser.add_argument("--slow-upload", type=int)
    parser.add_argument("--stop-parent", action="store_true")
    parser.add_argument("--once", type=_disturbances, default={})
    parser.add_argument("--leave-at", type=int)
    chosen = parser.parse_args()
    ignores = chosen.deaf or chosen.stop_parent or "preempt" in chosen.once.values()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignores else signal.SIG_DFL)
    line = sys.stdin.buffer.readline()
    if not line:
        return
    spec = TrainerSpec.model_validate_json(line)
    store, prefix = open_store(spec.store_url), run_prefix(spec.run_id)
    steps = StepLog(store, prefix, spec.attempt, spec.claim_id, spool_dir=spec.work_dir)
    with heard_by(spec.work_dir, spec.attempt).open("ab", buffering=0) as heard:
        heard.write(line)
        step = first = spec.resume.step if spec.resume else 0
        _send(Ready(step=step, state_sha256=None, parameters=3, device=spec.training.device, peak=PEAK))
        for line in sys.stdin.buffer:
            heard.write(line)
            command = decode_message(line)
            if not isinstance(command, TrainUntil):
                if chosen.linger:
                    _linger(spec)
                return
            if chosen.deaf:
                signal.pause()
            for event in _segment(spec, first, step, command, chosen):
                if isinstance(event, StepDone):
                    steps.write(event.record)
                elif isinstance(event, SegmentDone):
                    steps.publish()
                _send(event)
            step = command.step


def _linger(spec: TrainerSpec) -> None:
    log = RunLog(open_store(spec.store_url), spec.run_id)
    while log.refresh().finished is None:
        time.sleep(0.01)
    (spec.work_dir / "finished-before-its-trainer").touch()
    signal.pause()


def _segment(
    spec: TrainerSpec, first: int, step: int, command: TrainUntil, chosen: argparse.Namespace
) -> Iterator[Event]:
    until, slow = command.step, chosen.slow_upload
    if is_leaving := chosen.leave_at is not None and step < chosen.leave_at <= until:
        until = chosen.leave_at
    for number in range(step + 1, until + 1):
        record, trained = _record(spec, number, chosen.first_loss), number - first
        yield StepDone(record=record, tokens=trained * STEP_TOKENS, gpu_seconds=trained * STEP_GPU_SECONDS)
        if number == chosen.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if number in chosen.once and not (marker := spec.work_dir / f"disturbed-{number}").exists():
            marker.touch()
            yield from _disturb(chosen.once[number], number)
    tokens, gpu_seconds = (until - first) * STEP_TOKENS, (until - first) * STEP_GPU_SECONDS
    done = SegmentDone(step=until, stopped=is_leaving, tokens=tokens, gpu_seconds=gpu_seconds)
    if is_leaving:
        yield done
        yield CheckpointDropped(step=until, why="a rank was lost")
        return
    if slow is not None and until > slow and command.stall_seconds is not None:
        if chosen.stop_parent:
            os.kill(os.getppid(), signal.SIGTERM)
        yield replace(done, behind=slow)
        return
    if until > (slow or until):
        yield _stage(spec, slow)
        chosen.slow_upload = None
    yield done
    if until != slow:
        yield _stage(spec, until)


def _disturbances(words: str) -> dict[int, str]:
    """Return what disturbs the run after which step."""
    return {int(step): kind for kind, _, step in (word.partition("@") for word in words.split(","))}


def _disturb(kind: str, step: int) -> Iterator[Event]:
    if kind == "preempt":
        os.kill(os.getppid(), signal.SIGTERM)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "lose-rank":
        detail = f"rank 1 lost after step {step}; 0 go on with the same bits"
        yield MembersChanged(attempt=1, step=step + 1, lost=(1,), remaining=(0,), detail=detail, charged="lost")
        signal.pause()
    else:
        windows = (1, 2) if kind == "bad-data" else ()
        yield ExceptionReport(
            kind=ErrorKind(kind), exception="E", message="by the test", traceback=(), step=step, windows=windows
        )
        sys.exit(1)


def _record(spec: TrainerSpec, step: int, first_loss: float) -> StepRecord:
    return StepRecord(
        step=step,
        attempt=spec.attempt,
        train_loss=loss_of(step, first_loss),
        lr=0.01,
        grad_norm=0.5,
        tokens_per_second=TOKENS_PER_SECOND,
        mfu=0.02,
        memory_bytes=11,
        seconds=STEP_GPU_SECONDS,
        probe_loss=None,
        sample=None,
    )


def _stage(spec: TrainerSpec, step: int) -> StagedCheckpoint:
    try:
        return _try_to_stage(spec, step)
    except StorageError as error:
        report = ExceptionReport(
            kind=kind_of(error), exception=type(error).__name__, message=str(error), traceback=(), step=step, windows=()
        )
        _send(report)
        sys.exit(1)


def _try_to_stage(spec: TrainerSpec, step: int) -> StagedCheckpoint:
    weights = TensorRecord(name="w", dtype="U8", shape=(4,), data=memoryview(step.to_bytes(4, "little")))
    return stage_checkpoint(
        open_store(spec.store_url),
        target=checkpoint_target(spec.run_id, step=step, attempt=spec.attempt),
        groups=(TensorGroup(name="weights", records=(weights,)),),
        trainer=TrainerDocument(version=1, step=step, cursor=step, learning_rate=0.01, versions={}, tensors=()),
    )


def _send(event: Event) -> None:
    sys.stdout.buffer.write(encode_message(event))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
