"""A late request of a dead process breaks nothing, wherever it arrives: hundreds by default, all in the full amount.

`CAIRN_TEST_EVERY_ARRIVAL=1` plays each of them, also those that cannot be told apart.
"""

import os
import random
import uuid
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import pytest

import cairn.storage.checkpoints.resume_point as resume_point
from tests.full_amount import FULL
from tests.protocol import commuting, processes
from tests.protocol.commuting import RecordingStore
from tests.protocol.late_requests import CASES, RIVALS, Sent, arrive, moments, play, send, senders
from tests.protocol.processes import Act
from tests.protocol.raw_history import Violation
from tests.protocol.scenarios import world_before
from tests.protocol.world import Copies, WatchedStore, copied

LEAST = 200_000
APART = "CAIRN_TEST_EVERY_ARRIVAL" in os.environ
_ACTS, _SENT, _MOMENTS = 2, 2, 2
"""By default so many requests of so many acts of a case arrive, each at so many moments of one rival."""
_COMPARED = 40 if FULL else 2
"""Of so many requests moments that cannot be told apart are played: by default the first and the last, or all."""


def sent_in(case: str, folder: Path, *, everything: bool = FULL) -> Iterator[Sent]:
    """Yield all requests of a case, or some that its name draws."""
    scenario, acts = CASES[case]
    copies, chance = Copies("memory", folder, world_before(scenario)), random.Random(case)
    found = list(senders(scenario, acts if everything else chance.sample(acts, min(_ACTS, len(acts))), copies))
    chosen = found if everything else chance.sample(found, min(_SENT, len(found)))
    yield from (send(sender, copies) for sender in chosen)


def apart(found: list[range]) -> list[range]:
    """Return every moment on its own."""
    return [range(at, at + 1) for same in found for at in same]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_a_late_request_breaks_no_invariant_wherever_it_arrives(
    case: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    chance, arrivals, played = random.Random(case), 0, 0
    for sent in sent_in(case, tmp_path):
        for rival in RIVALS if FULL else chance.sample(RIVALS, 1):
            found = moments(sent, rival)
            chosen = found if FULL else chance.sample(found, min(_MOMENTS, len(found)))
            arrivals += sum(map(len, chosen))
            played += arrive(sent, rival, apart(chosen) if APART else chosen)
    record_property("protocol_arrivals", arrivals)
    record_property("protocol_arrivals_played", played)


@pytest.mark.skipif(not FULL, reason="counts what the full amount has to try")
def test_the_full_amount_has_its_least_number_of_arrivals(tmp_path: Path) -> None:
    found = (moments(sent, rival) for case in CASES for sent in sent_in(case, tmp_path) for rival in RIVALS)
    assert sum(len(same) for each in found for same in each) >= LEAST


def ends(sent: Sent, rival: Act, same: range, quick: pytest.MonkeyPatch) -> set[str]:
    """Return in how many ways the world ends after arrivals at these moments, with ids that are drawn in one order."""
    found = set[str]()
    for at in same:
        ids = count(1)
        with quick.context() as patch:
            patch.setattr(uuid, "uuid4", lambda ids=ids: uuid.UUID(int=next(ids)))
            patch.setattr(processes, "_PIDS", count(50_000))
            store, ledger = play(sent, rival, at)
        found.add(f"{sorted(store.inner._objects.items())} {store.leftovers} {ledger}")
    return found


def outermost(same: range) -> range:
    """Return the first and the last of these moments."""
    return same[:: max(1, len(same) - 1)]


def drawn(folder: Path) -> Iterator[tuple[Sent, Act]]:
    """Yield a request and a rival of each case, in an order of chance."""
    chance = random.Random(40)
    for case in chance.sample(sorted(CASES), len(CASES)):
        for sent in islice(sent_in(case, folder, everything=False), 1):
            yield sent, chance.choice(RIVALS)


def test_arrivals_that_nobody_can_tell_apart_end_in_the_same_bytes(tmp_path: Path, quick: pytest.MonkeyPatch) -> None:
    for sent, rival in islice(drawn(tmp_path), _COMPARED):
        for same in moments(sent, rival):
            chosen = same if FULL else outermost(same)
            assert len(ends(sent, rival, chosen, quick)) == 1, f"{sent} at one of {chosen} of {rival.__name__}"


def test_arrivals_that_can_be_told_apart_end_in_other_bytes(tmp_path: Path, quick: pytest.MonkeyPatch) -> None:
    quick.setattr(commuting, "_commutes", lambda operation, after, late: True)
    found = ((sent, rival, outermost(moments(sent, rival)[0])) for sent, rival in drawn(tmp_path))
    assert any(len(ends(sent, rival, two, quick)) > 1 for sent, rival, two in found)


@pytest.mark.parametrize(
    ("ask", "together"),
    [
        (lambda store: store.read("runs/r/other"), True),
        (lambda store: store.create("runs/r/other", b"o"), True),
        (lambda store: store.keys("runs/s"), True),
        (lambda store: store.write("runs/r/a", b"b"), True),
        (lambda store: store.keys("runs/r"), False),
        (lambda store: store.size("runs/r/a"), False),
        (lambda store: store.create("runs/r/a", b"a"), False),
        (lambda store: store.inner, False),
    ],
)
def test_an_arrival_before_an_operation_is_one_after_it_where_answer_and_store_are_the_same(
    ask: Callable[[RecordingStore], object], together: bool
) -> None:
    store = RecordingStore(WatchedStore(copied({"runs/r/other": b"o"})))
    store.size("runs/s/first")
    ask(store)
    store.size("runs/s/last")
    found = store.moments(lambda arrived: arrived.create("runs/r/a", b"a"))
    assert (len(found) == 1) == together


def test_a_sweep_that_closes_nothing_is_caught(tmp_path: Path, quick: pytest.MonkeyPatch) -> None:
    sent = next(
        item for item in sent_in("fork", tmp_path, everything=True) if item.request[1][0].startswith("runs/twin/")
    )
    quick.setattr(resume_point, "_abandoned", lambda pin, state: None)
    with pytest.raises(Violation, match=r"a fork keeps its beginning|a fork goes on"):
        arrive(sent, processes.sweep, moments(sent, processes.sweep))
