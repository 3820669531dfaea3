"""No cure is named that the run has in effect, whatever the verdict: cures by configuration."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.run_state import AttemptRecord, RunState
from cairn.tasks.evaluator.curve_reader import CurveReader
from cairn.tasks.policy.curve_statistics import Curve
from cairn.tasks.policy.curve_verdict import VerdictKind, judge
from tests.entries import CONFIG, NOON, started
from tests.storage.builders import opened
from tests.tasks.long_run import LongRun

STEPS = 400
FALLING = 2.5 + 3.0 * np.exp(-4.0 * np.arange(STEPS) / STEPS)
USUAL: dict[str, Any] = {"learning_rates": [1e-3] * STEPS, "grad_norms": [1.0] * STEPS}
RISING = tuple((step, 3.0 + abs(step - 150) / 100) for step in range(50, 401, 50))


def raised(step: int, nats: float, until: int | None = None) -> np.ndarray:
    losses = FALLING.copy()
    losses[step:until] += nats
    return losses


LOUD = [*[1.0] * 350, 99.0, *[1.0] * 49]
SICK: dict[VerdictKind, dict[str, Any]] = {
    VerdictKind.TOO_EARLY: {"train_losses": FALLING[:5], "learning_rates": (), "grad_norms": ()},
    VerdictKind.PLATEAU: {"train_losses": np.full(STEPS, 3.0)},
    VerdictKind.SPIKING: {"train_losses": raised(350, 3.0, 351), "grad_norms": LOUD},
    VerdictKind.CLIPPING: {"train_losses": FALLING, "grad_norms": [50.0] * STEPS},
    VerdictKind.REPEATING: {"train_losses": FALLING, "samples": ["the same"] * 3},
    VerdictKind.SLOW: {
        "train_losses": FALLING,
        "tokens_per_second": [*[9.0] * 350, *[1.0] * 50],
        "seconds": [9.0] * STEPS,
    },
    VerdictKind.STRAGGLING: {"train_losses": FALLING, "slowest_ranks": [("rank 3", 1.8)] * STEPS},
    VerdictKind.OVERFITTING: {"train_losses": FALLING, "val": RISING},
    VerdictKind.STUCK: {"train_losses": np.full(STEPS, math.log(257))},
    VerdictKind.DIVERGING: {"train_losses": raised(350, 3.0), "grad_norms": LOUD},
}
IN_EFFECT: dict[str, tuple[dict[str, Any], str]] = {
    "grad_clip = 1": ({"grad_clip": 1.0}, "training.grad_clip = 1.0"),
    "grad_clip below 1": ({"grad_clip": 0.5}, "training.grad_clip = 1.0"),
    "min_lr = 0": ({"min_lr": 0.0}, "a lower training.min_lr"),
    "a dead rate": ({"learning_rates": [*[1e-3] * 300, *[1e-7] * 100]}, "Let the learning rate fall"),
    "a rate that is not dead": ({"learning_rates": [1e-3] * STEPS}, "has fallen to almost nothing"),
    "patience": ({"patience": 3}, "patience"),
    "overfit_ratio": ({"overfit_ratio": 1.5}, "overfit_ratio"),
    "one thread": ({"threads": 1}, "fewer training.threads"),
}
NOT_IN_EFFECT: dict[str, tuple[VerdictKind, dict[str, Any]]] = {
    "training.grad_clip = 1.0": (VerdictKind.SPIKING, {"grad_clip": 0.0}),
    "grad_clip = 1.0": (VerdictKind.DIVERGING, {"grad_clip": 4.0}),
    "a lower training.min_lr": (VerdictKind.PLATEAU, {"min_lr": 1e-4}),
    "fall sooner": (VerdictKind.PLATEAU, {"min_lr": 0.0}),
    "has fallen to almost nothing": (VerdictKind.PLATEAU, IN_EFFECT["a dead rate"][0]),
    "[early_stop] patience": (VerdictKind.PLATEAU, {}),
    "[early_stop] overfit_ratio": (VerdictKind.OVERFITTING, {}),
    "fewer training.threads": (VerdictKind.SLOW, {"threads": 2}),
}


def cures(kind: VerdictKind, **settings: Any) -> tuple[str, ...]:
    fields = USUAL | {"grad_clip": 1.0} | SICK[kind] | settings
    if kind == VerdictKind.TOO_EARLY:
        fields["learning_rates"] = ()
    if kind == VerdictKind.CLIPPING:
        fields["grad_clip"] = fields["grad_clip"] or 1.0
    verdict = judge(Curve(steps=range(1, len(fields["train_losses"]) + 1), vocab_size=257, **fields))
    assert verdict.kind == kind
    return verdict.cures


@pytest.mark.parametrize("configuration", IN_EFFECT)
@pytest.mark.parametrize("kind", SICK)
def test_a_cure_in_effect_is_not_named_and_others_are(kind: VerdictKind, configuration: str) -> None:
    settings, phrase = IN_EFFECT[configuration]
    named = cures(kind, **settings)
    assert named and not any(phrase in cure for cure in named)


@pytest.mark.parametrize("phrase", NOT_IN_EFFECT)
def test_a_cure_that_is_not_in_effect_is_named(phrase: str) -> None:
    kind, settings = NOT_IN_EFFECT[phrase]
    assert any(phrase in cure for cure in cures(kind, **settings))


def test_a_healthy_curve_needs_no_cure() -> None:
    assert judge(Curve(steps=range(STEPS), train_losses=FALLING)).cures == ()


def test_what_is_in_effect_is_read_from_the_run_and_its_newest_attempt() -> None:
    run = CONFIG | {"training": CONFIG["training"] | {"min_lr": 0.0, "threads": 2, "grad_clip": 0.5}}
    newest = CONFIG | {"early_stop": CONFIG["early_stop"] | {"patience": 4, "overfit_ratio": 1.5}}
    attempt = AttemptRecord(started=replace(started(1), config=newest), started_at=NOON)
    state = RunState(opened=replace(opened(), config=run), attempts=History([attempt]))
    curve = CurveReader(LongRun(), "runs/r").read(state, suite_sha256=None)
    assert (curve.patience, curve.overfit_ratio) == (4, 1.5)
    assert (curve.min_lr, curve.threads, curve.grad_clip) == (0.0, 2, 0.5)
