"""A thousand commits in one go, each evaluated: what the command holds at the end is what it held at half of them.

With real trainers, and an evaluation now and then: tests/crash/test_soak.py.
"""

import json
import statistics
import subprocess
import sys

import pytest

from tests.processes.fork_server import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.linux, pytest.mark.timeout(1800)]
COMMITS = 1_000
_GROWTH_BYTES = 12 << 20
"""What arenas of freed memory may add; evaluations that stay as objects would be 20 MB."""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """What the command held at each evaluation."""
    folder = tmp_path_factory.mktemp("many")
    words = [sys.executable, "-m", "tests.wiring.many_commits", str(folder), str(COMMITS)]
    with (folder / "err.txt").open("w") as err:
        found = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=err, text=True)
    assert found.returncode == 0, (folder / "err.txt").read_text()[-2000:]
    looks = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(looks) >= COMMITS
    return looks


def middle_and_end(held: list[dict[str, int]], of: str) -> tuple[float, float]:
    """Return the median of the third fifth and of the last one; before that histories fill what they keep at hand."""
    fifth = len(held) // 5
    middle, end = held[2 * fifth : 3 * fifth], held[-fifth:]
    return statistics.median(look[of] for look in middle), statistics.median(look[of] for look in end)


def test_a_command_holds_as_much_memory_after_a_thousand_commits_as_after_half_of_them(
    held: list[dict[str, int]],
) -> None:
    middle, end = middle_and_end(held, "bytes")
    assert end - middle < _GROWTH_BYTES, [look["bytes"] >> 20 for look in held[::50]]


@pytest.mark.parametrize("of", ["files", "threads"])
def test_a_command_holds_as_many_descriptors_and_threads_after_a_thousand_commits_as_after_half_of_them(
    held: list[dict[str, int]], of: str
) -> None:
    middle, end = middle_and_end(held, of)
    assert end <= middle + 1, [look[of] for look in held[::50]]
