"""A late request of a dead process breaks nothing, wherever it arrives: hundreds by default, all in the full amount."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cairn.storage.checkpoints.fork_pin as fork_pin
from tests.full_amount import FULL
from tests.protocol import processes
from tests.protocol.late_requests import CASES, RIVALS, Sent, arrive, count_moments, send, senders
from tests.protocol.raw_history import Violation
from tests.protocol.scenarios import world_before
from tests.protocol.world import Copies

LEAST = 200_000
_ACTS, _SENT, _MOMENTS = 2, 3, 4
"""By default so many requests of so many acts of a case arrive, each at so many moments of one rival."""


def sent_in(case: str, folder: Path, *, everything: bool = FULL) -> Iterator[Sent]:
    """Yield all requests of a case, or some that its name draws."""
    scenario, acts = CASES[case]
    copies, chance = Copies("memory", folder, world_before(scenario)), random.Random(case)
    found = list(senders(scenario, acts if everything else chance.sample(acts, min(_ACTS, len(acts))), copies))
    chosen = found if everything else chance.sample(found, min(_SENT, len(found)))
    yield from (send(sender, copies) for sender in chosen)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_a_late_request_breaks_no_invariant_wherever_it_arrives(
    case: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    chance, number = random.Random(case), 0
    for sent in sent_in(case, tmp_path):
        for rival in RIVALS if FULL else chance.sample(RIVALS, 1):
            moments = range(count_moments(sent, rival))
            number += arrive(sent, rival, moments if FULL else chance.sample(moments, min(_MOMENTS, len(moments))))
    record_property("protocol_arrivals", number)


@pytest.mark.skipif(not FULL, reason="counts what the full amount has to try")
def test_the_full_amount_has_its_least_number_of_arrivals(tmp_path: Path) -> None:
    counts = (count_moments(sent, rival) for case in CASES for sent in sent_in(case, tmp_path) for rival in RIVALS)
    assert sum(counts) >= LEAST


def test_a_sweep_that_closes_nothing_is_caught(tmp_path: Path, quick: pytest.MonkeyPatch) -> None:
    sent = next(
        item for item in sent_in("fork", tmp_path, everything=True) if item.request[1][0].startswith("runs/twin/")
    )
    quick.setattr(fork_pin, "_abandoned", lambda pin, state: None)
    with pytest.raises(Violation, match=r"a fork keeps its beginning|a fork goes on"):
        arrive(sent, processes.sweep, range(count_moments(sent, processes.sweep)))
