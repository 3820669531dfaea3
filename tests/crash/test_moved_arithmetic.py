"""A run that moves to another vector width and back: said everywhere, and with the portable set the bits stay."""

import json

import pytest
import torch

from tests.crash.training_command import RUN, Command
from tests.programs.benchmarks.own_process import set_options

WIDTHS: tuple[dict[str, str], ...] = ({}, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, {})
SHORT = (
    *("training.steps=18", "evaluation.every_commits=100", "training.kernels=stock", "training.probe_every_steps=0"),
    *("training.precision=fp32", "checkpoint.every_steps=6"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="has no wider width to move from"),
]


class Moved:
    """A run of which each third is trained at another width, and an undisturbed one."""

    def __init__(self, factory: pytest.TempPathFactory, api_url: str, arithmetic: str) -> None:
        """Train both."""
        self.extra = set_options((*SHORT, f"training.arithmetic={arithmetic}"))
        self.command = Command(factory.mktemp("moved"), api_url, forked=False)
        self.still = Command(factory.mktemp("still"), api_url, forked=False)
        for step, (variables, code) in enumerate(zip(WIDTHS, (75, 75, 0), strict=True), start=1):
            faults = {"CAIRN_FAULTS": f"preempt@{6 * step}"} if code else {}
            self.command.train(*self.extra, exit_code=code, **variables, **faults)
        self.still.train(*self.extra)

    def asked(self, *words: str, code: int = 0, **variables: str) -> str:
        """Return what another command says of the moved run."""
        process = self.command.start_verb(*words, **variables)
        assert process.wait(300) == code, self.command.output()
        return self.command.output()


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Moved:
    return Moved(tmp_path_factory, api_url, "native")


def test_a_start_on_another_width_says_that_bits_may_differ(native: Moved) -> None:
    assert "bits may differ from here: arithmetic " in native.command.output()
    assert "ATen AVX2 ONEDNN_MAX_CPU_ISA=AVX2 → ATen AVX512" in native.command.output()


def test_receipts_status_and_explanation_say_it(native: Moved) -> None:
    receipts = json.loads(native.asked("attempts", RUN, "--json"))
    assert [bool(item["arithmetic_moved"]) for item in receipts] == [False, True, True]
    assert len({item["arithmetic"]["digest"] for item in receipts}) == 2
    status = " ".join(native.asked("status", RUN).split())
    assert "may differ from step 6 on: attempt 2" in status and "may differ from step 12 on: attempt 3" in status
    assert "Bits may differ from here" in " ".join(native.asked("explain", RUN, "--attempt", "2").split())
    query = "select count(*) as moved from training_attempts where arithmetic_moved != ''"
    assert json.loads(native.asked("sql", query, "--json")) == [{"moved": 2}]


def test_a_replay_accuses_no_segment_of_another_width(native: Moved) -> None:
    replayed = json.loads(native.asked("replay", RUN, "--json"))
    outcomes = [item["outcome"] for item in replayed["segments"]]
    assert outcomes == ["equal", "skipped", "equal"]
    assert "ATEN_CPU_CAPABILITY=avx2 cairn replay" in replayed["segments"][1]["why"]
    narrow = json.loads(native.asked("replay", RUN, "--json", **WIDTHS[1]))
    assert [item["outcome"] for item in narrow["segments"]] == ["skipped", "equal", "skipped"]


def test_with_the_portable_set_a_run_that_moved_ends_with_the_bits_of_one_that_did_not(
    tmp_path_factory: pytest.TempPathFactory, api_url: str
) -> None:
    moved = Moved(tmp_path_factory, api_url, "portable")
    assert moved.command.state_sha256() == moved.still.state_sha256()
    receipts = json.loads(moved.asked("attempts", RUN, "--json"))
    assert len({item["arithmetic"]["digest"] for item in receipts}) == 1
    replayed = json.loads(moved.asked("replay", RUN, "--json", **WIDTHS[1]))
    assert [item["outcome"] for item in replayed["segments"]] == ["equal"] * 3
