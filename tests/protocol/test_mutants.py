"""The suite can fail: each deliberate mistake in the protocol is caught, and by the invariant that is meant to."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.protocol.enumeration import ALL_SCENARIOS, all_cases, run_case
from tests.protocol.mutants import MUTANTS, Mutant
from tests.protocol.raw_history import Violation
from tests.protocol.scenarios import world_before
from tests.protocol.simulator import simulate
from tests.protocol.world import Copies

SEEDS = 600


def hunt(mutant: Mutant, folder: Path) -> str | None:
    """Return what the first violation says, or None where nobody noticed."""
    try:
        for scenario in (item for item in ALL_SCENARIOS if item.name in mutant.scenarios):
            copies = Copies("memory", folder, world_before(scenario))
            for case in sorted(all_cases(scenario, copies), key=lambda case: case.trouble.name != mutant.trouble):
                run_case(case, copies)
        for number in range(SEEDS):
            simulate((mutant.first_seed + number) % SEEDS)
    except Violation as violation:
        return str(violation)
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(
    mutant: Mutant, tmp_path: Path, quick: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    for scenario in ALL_SCENARIOS:
        world_before(scenario)  # by honest code
    mutant.patch(quick)
    caught = hunt(mutant, tmp_path)
    assert caught is not None, f"nobody noticed {mutant.name}"
    assert caught.split(": ")[0] in mutant.caught_by, caught
    record_property("protocol_mutants", 1)
    record_property("protocol_mutant_caught_by", caught.split("\n")[0])
