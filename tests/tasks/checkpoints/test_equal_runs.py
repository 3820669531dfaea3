"""How often the default gate promotes a run that differs from the champion in its seed alone, by 40 real tiny runs.

`tests/programs/benchmarks/equal_runs.py` made them. 400 ordered pairs share their runs, so the sampling error is a
jackknife's over runs. Run with -s for the table.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from cairn.storage.logs.registry import Promoted
from cairn.storage.logs.window_losses import WindowLosses
from cairn.tasks.checkpoints.promotion import PromotionRules, decide_promotion
from cairn.tasks.configuration.settings import PromotionConfig
from tests.entries import evaluated
from tests.programs.benchmarks.equal_runs import BLOCK, read_losses
from tests.tasks.checkpoints.promotion_records import candidate, holding, promoted

RUNS, RIVALS = 40, 10
DEFAULT = PromotionConfig().min_improvement
SLICES = pytest.mark.parametrize(
    "every",
    [
        pytest.param(1, id="whole text"),
        pytest.param(2, id="half of it", marks=pytest.mark.slow),  # quick witness: the other two
        pytest.param(4, id="a quarter"),
    ],
)


@cache
def is_promoted(champion: int, offered: int, every: int, margin: float, head_start: float = 0.0) -> bool:
    """Ask the gates about one run against another, on every n-th window."""
    rows: NDArray[np.float64] = read_losses()[[champion, offered], ::every]
    of = {
        name: WindowLosses(window_tokens=BLOCK, losses={"val_loss": tuple(row.tolist())})
        for name, row in zip(("r0", "r1"), (rows[0] + head_start, rows[1]), strict=True)
    }
    before, now = (
        evaluated(step, float(np.mean(of[run].losses["val_loss"]))) for step, run in ((10, "r0"), (20, "r1"))
    )
    decision = decide_promotion(
        holding(replace(promoted(), metrics=before.metrics)),
        candidate(now),
        PromotionRules(min_improvement=margin),
        alias="champion",
        read_evaluations=lambda _: (before,),
        read_losses=lambda run_id, _: of[run_id],
    )
    return isinstance(decision, Promoted)


def share(every: int, margin: float, head_start: float = 0.0, runs: Sequence[int] = range(RUNS)) -> float:
    """Return the share of promotions where each run is offered against the ten that follow it."""
    pairs = [(runs[at], runs[(at + k) % len(runs)]) for at in range(len(runs)) for k in range(1, RIVALS + 1)]
    return float(np.mean([is_promoted(*pair, every, margin, head_start) for pair in pairs]))


def jackknife(every: int, margin: float) -> float:
    """Return the standard error of the share: each run is left out in turn."""
    left = np.array([share(every, margin, runs=[run for run in range(RUNS) if run != out]) for out in range(RUNS)])
    return float(np.sqrt((RUNS - 1) / RUNS * np.sum((left - left.mean()) ** 2)))


@SLICES
def test_a_run_of_another_seed_is_promoted_in_at_most_five_of_a_hundred_pairs(every: int) -> None:
    found, error = share(every, DEFAULT), jackknife(every, DEFAULT)
    print(f"\nevery {every} windows: {found:.4f} ± {error:.4f} of {RUNS * RIVALS} pairs")
    assert found + 1.645 * error <= 0.05, "the upper 95 % bound"


@SLICES
def test_without_a_margin_seeds_are_promoted_that_differ_by_more_than_their_windows_noise(every: int) -> None:
    assert share(every, 0.0) > 0.1, "else the default margin would be needless"


@SLICES
def test_a_run_that_is_better_by_six_hundredths_of_a_nat_is_promoted_in_nine_of_ten_pairs(every: int) -> None:
    assert share(every, DEFAULT, head_start=0.06) >= 0.9
