"""The table of configuration keys: for each the case that sees it act, or the tests of the suite that do."""

from collections.abc import Callable
from typing import Any

Case = Callable[[Any], None]
CASES: dict[str, Case] = {}
"""Key → a function of the `Bench` that raises unless the key acts."""
NAMED: dict[str, str] = {}
"""Key → the test that starts a trainer, a flow or a command with it and sees it act."""
REFUSED = frozenset({"budgets.evaluator-failed.samples"})
"""Keys that are listed with those of other reasons and are refused: a failed evaluator quarantines nothing."""


def acts(*keys: str) -> Callable[[Case], Case]:
    """Enter a case for these keys."""

    def enter(case: Case) -> Case:
        for key in keys:
            assert key not in CASES and key not in NAMED, key
            CASES[key] = case
        return case

    return enter


def seen_by(test: str, *keys: str) -> None:
    """Enter a test for these keys."""
    for key in keys:
        assert key not in CASES and key not in NAMED, key
        NAMED[key] = test
