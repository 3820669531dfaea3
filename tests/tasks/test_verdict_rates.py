"""How often verdicts are wrong on 3,000 made-up curves; thresholds were chosen on the first half of the seeds."""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from cairn.tasks.policy.curve_verdict import judge
from tests.tasks.synthetic_curves import FAMILIES, example

CURVES, CHOSEN_ON = 3_000, 1_500
FALSE, MISSED = 0.01, 0.02
PAGE = Path(__file__).parents[2] / "docs/decisions/13-evaluation.md"


def upper_bound(wrong: int, count: int) -> float:
    """Return the largest rate at which so few wrong ones or fewer still have a chance of 5 % (Clopper and Pearson)."""
    low, high = wrong / count, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        chance = sum(
            math.comb(count, found) * rate**found * (1 - rate) ** (count - found) for found in range(wrong + 1)
        )
        low, high = (rate, high) if chance > 0.05 else (low, rate)
    return high


def count_wrong(seeds: Iterable[int]) -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of curves and of wrong verdicts by family."""
    counted, wrong = Counter[str](), Counter[str]()
    for seed in seeds:
        made = example(seed)
        counted[made.family] += 1
        wrong[made.family] += judge(made.curve).kind not in made.right
    return counted, wrong


def test_the_bound_is_that_of_the_table() -> None:
    assert [round(upper_bound(*pair), 4) for pair in ((0, 100), (1, 100), (5, 100))] == [0.0295, 0.0466, 0.1023]


def test_one_spike_is_missed_of_the_first_six_measured_curves_of_each_family() -> None:
    counted, wrong = count_wrong(range(CHOSEN_ON, CHOSEN_ON + 6 * len(FAMILIES)))
    assert (set(counted.values()), +wrong) == ({6}, Counter(recovering_spike=1))


@pytest.mark.slow
def test_false_alarms_and_misses_are_below_their_bounds_and_the_page_has_the_counts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = []
    for seeds in (range(CHOSEN_ON), range(CHOSEN_ON, CURVES)):
        counted, wrong = count_wrong(seeds)
        cells = [f"{seeds.start} to {seeds.stop - 1}"]
        for families, most in ((FAMILIES[:7], FALSE), (FAMILIES[7:], MISSED)):
            names = [family.__name__ for family in families]
            bad, of = sum(wrong[name] for name in names), sum(counted[name] for name in names)
            assert upper_bound(bad, of) < most, +wrong
            cells.append(f"{bad} of {of} ({upper_bound(bad, of):.2%})")
        rows.append(f"| {' | '.join(cells)} |")
    assert [row for row in rows if row not in page] == []
