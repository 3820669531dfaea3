"""A verdict reads each step record once, in memory that does not grow, and is the one of the whole curve."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_state import AttemptRecord, RunState
from cairn.storage.logs.step_log import StepRecord, splice
from cairn.tasks.evaluator.curve_reader import CurveReader
from cairn.tasks.policy import curve_statistics
from cairn.tasks.policy.curve_statistics import Curve, CurveFold
from cairn.tasks.policy.curve_verdict import judge
from tests.entries import NOON, started
from tests.full_amount import FULL
from tests.tasks.long_run import LongRun, step_record

FOLDED_STEPS = 4_000
"""A fifth of the product's, and so is the work; `tests/tasks/policy/million_steps.py` folds at its own height."""
COUNT, UNIFORM = 5 * FOLDED_STEPS // 2, math.log(257)
Floats = np.ndarray


def falling(count: int = COUNT) -> Floats:
    noise = np.random.default_rng(0).normal(0, 0.05, count)
    return 2.0 + 3.0 * np.exp(-np.arange(count) / count) + noise


def changed(place: slice, change: Callable[[Floats], Floats]) -> Floats:
    losses = falling()
    losses[place] = change(losses[place])
    return losses


CURVES = {
    "healthy": falling(),
    "diverging": changed(slice(COUNT - 300, None), lambda losses: losses + 2.0),
    "diverging from a best level long ago": changed(slice(2000, 2400), lambda losses: losses - 2.5),
    "diverging by one step long ago": changed(slice(700, 701), lambda losses: losses * math.nan),
    "stuck": np.full(COUNT, UNIFORM) + np.random.default_rng(0).normal(0, 0.01, COUNT),
    "diverging after a jump long ago": changed(slice(3_000, None), lambda losses: losses + 1.6)
    + 1.0 * (np.arange(COUNT) > COUNT - 2000),
    "healthy after a jump long ago": changed(slice(3_000, None), lambda losses: losses + 1.6),
    "spiking": changed(slice(COUNT - 50, COUNT - 49), lambda losses: losses + 5.0),
    "plateau": np.full(COUNT, 2.5) + np.random.default_rng(0).normal(0, 0.01, COUNT),
}


def whole(records: Sequence[StepRecord]) -> Curve:
    return Curve(
        steps=[record.step for record in records],
        train_losses=[record.train_loss for record in records],
        grad_norms=[record.grad_norm for record in records],
        learning_rates=[record.lr for record in records],
        tokens_per_second=[record.tokens_per_second for record in records],
        seconds=[record.seconds for record in records],
    )


@pytest.mark.parametrize("name", CURVES)
def test_a_long_curve_gets_the_verdict_of_all_its_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_statistics, "FOLDED_STEPS", FOLDED_STEPS)
    loud = {2401, COUNT - 1998, COUNT - 299, COUNT - 49} if not name.startswith("healthy") else ()
    records = [
        step_record(step, loss=float(loss), grad_norm=50.0 if step in loud else 0.5)
        for step, loss in enumerate(CURVES[name], 1)
    ]
    fold, val = CurveFold(), ((1_000, 3.4), (COUNT, 3.1))
    for record in records:
        fold.add(record, None)
    rest = {"val": val, "vocab_size": 257, "grad_clip": 1.0}
    assert fold.curve().beginning.count == FOLDED_STEPS
    found, expected = (judge(replace(curve, **rest)) for curve in (fold.curve(), whole(records)))  # type: ignore[arg-type]
    assert (found.kind, found.kind) == (name.split()[0], expected.kind)
    assert found.numbers.keys() == expected.numbers.keys()
    for key, value in found.numbers.items():  # blocks before the newest steps may begin elsewhere
        assert value == pytest.approx(
            expected.numbers[key], **{"abs": 200} if key == "best_train_step" else {"rel": 0.02}
        )


def attempts(*first_steps: int) -> History[AttemptRecord]:
    made = (
        started(number, resumed_from=CheckpointReference(step=first, attempt=1, prefix="p", manifest_sha256="m"))
        for number, first in enumerate(first_steps, 1)
    )
    return History(AttemptRecord(started=item, started_at=NOON) for item in made)


@pytest.mark.parametrize("seed", range(300 if FULL else 20))
def test_a_curve_that_is_read_as_it_grows_is_the_one_that_is_read_at_once(seed: int) -> None:
    drawn, run, firsts, step = np.random.default_rng(seed), LongRun(), [0], 0
    reader = CurveReader(run, "runs/r")
    for _ in range(30):
        if drawn.random() < 0.2:  # a later attempt, from a step that was reached
            step = int(drawn.integers(0, step + 1))
            firsts.append(step)
        run.train(len(firsts), step + 1, step := step + int(drawn.integers(0, 9)))
        state, until = RunState(attempts=attempts(*firsts)), int(drawn.integers(0, step + 3))
        read = reader.read(state, suite_sha256=None, until_step=until)
        surviving = [point.record for point in splice(run.records, state.attempts) if point.record.step <= until]
        assert list(zip(read.steps, read.train_losses, strict=True)) == [(i.step, i.train_loss) for i in surviving]


def test_a_verdict_reads_only_the_steps_since_the_one_before() -> None:
    run, read, state = LongRun(), list[int](), RunState(attempts=attempts(0))
    reader = CurveReader(run, "runs/r")
    for last in range(100, 2100, 100):
        run.train(1, last - 99, last)
        before = run.read_bytes
        judge(reader.read(state, suite_sha256=None, until_step=last))
        read.append(run.read_bytes - before)
    assert max(read) <= 1.1 * min(read)


@pytest.mark.slow
def test_a_million_steps_are_followed_in_300_megabytes_and_no_commit_reads_more_than_another() -> None:
    command = (sys.executable, "-m", "tests.tasks.policy.million_steps", "1000000", "100")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    commits = [json.loads(line) for line in done.stdout.splitlines()]
    assert [commit["steps"] for commit in commits] == list(range(10_000, 1_000_001, 10_000))
    assert commits[-1]["peak"] < 300e6 and commits[-1]["peak"] - commits[9]["peak"] < 20e6
    assert {commit["read"] for commit in commits} == {3 * 10_000 * 400}
