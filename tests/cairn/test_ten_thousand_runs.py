"""The live page over ten thousand runs that all train: its list and its scrape, asked for by many at once."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from cairn.storage.stores.local_store import LocalStore
from tests.cairn.live_server import LiveServer, served
from tests.fabricated_run import fabricate

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ten-thousand-runs")]
# quick witnesses: test_live_page.py (pages, an answer made once), test_run_metrics.py (turns, sharing)
RUNS, AT_ONCE, MOST_BYTES = 10_000, 200, 300e6


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("many")
    store = LocalStore(folder / "store")
    for number in range(RUNS):
        run = fabricate(store, f"run-{number:05}")
        run.start()
        run.beat(3)
    before = psutil.Process().memory_info().rss
    with served(store, folder / "work") as page:
        yield page
    assert psutil.Process().memory_info().rss - before < MOST_BYTES


def seconds_of(ask: Callable[[], object]) -> float:
    """Return the processor seconds of asking and answering, which are in this process, whatever runs beside it."""
    began = time.process_time()
    ask()
    return time.process_time() - began


def test_two_hundred_requests_at_once_are_answered_in_five_seconds(live: LiveServer) -> None:
    assert "10,000 runs" in live.ask("/", wait=0).text
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = (f"/?sort=run_id&page={number % 3 + 1}" for number in range(AT_ONCE))
        assert seconds_of(lambda: [a.status for a in pool.map(lambda path: live.ask(path, wait=0), asked)]) < 5.0


def test_a_scrape_is_answered_in_a_second_after_the_first(live: LiveServer) -> None:
    assert 'cairn_runs{state="running"} 10000.0' in live.ask("/metrics", wait=0).text
    assert seconds_of(lambda: live.ask("/metrics", wait=0)) < 1.0
