"""Real weights learn to answer in a style from 200 answers, with adapters and with all weights, killed and untouched.

`CAIRN_TEST_WEIGHTS=FOLDER` as in `test_real_weights.py`. Takes 7 GB of memory, 8 GB of disk, half an hour of two cores.
"""

import os
from pathlib import Path

import pytest

from tests.programs.benchmarks.bench_style import UNSEEN, Tuning, begin, is_in_style, spoken_by

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]
ENOUGH = 45
"""Of 50 answers to unseen questions, those in the style."""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    """Adapters untouched, killed on two processes, and all weights, killed; the last two are exported."""
    if not (weights := os.environ.get("CAIRN_TEST_WEIGHTS")):
        pytest.skip("no weights here: test_real_weights.py says how to make the folder; name it in CAIRN_TEST_WEIGHTS")
    tuning = begin(tmp_path_factory.mktemp("style"), Path(weights))
    tuning.train("alone", "adapters")
    tuning.train("adapters", "adapters", "--set", "training.processes=2", CAIRN_FAULTS="kill@25")
    tuning.train("whole", "all weights", CAIRN_FAULTS="kill@25")
    for run in ("adapters", "whole"):
        tuning.cairn("export", run, f"{run}-out")
    return tuning


def test_adapters_killed_on_two_processes_end_in_the_bits_of_one_that_nothing_touched(tuned: Tuning) -> None:
    alone, killed = tuned.state("alone"), tuned.state("adapters")
    assert len(killed.attempts) > 1 == len(alone.attempts)
    assert killed.finished is not None and alone.finished is not None
    assert killed.finished.state_sha256 == alone.finished.state_sha256


def test_a_commit_of_adapters_has_at_most_a_fiftieth_of_the_bytes(tuned: Tuning) -> None:
    small, large = (tuned.state(run).newest_committed for run in ("adapters", "whole"))
    assert small is not None and large is not None
    assert small.committed.bytes <= 0.02 * large.committed.bytes


@pytest.mark.parametrize("run", ["adapters", "whole"])
def test_transformers_answers_unseen_questions_in_the_style(tuned: Tuning, run: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        said = spoken_by(tuned.folder / f"{run}-out")
    assert len(said) == len(UNSEEN) == 50
    assert sum(is_in_style(*one) for one in said) >= ENOUGH, said
