"""The GPU check tried without a GPU: its limits, what it writes, and, part by part, the whole program on a CPU."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import bits, check, wheels
from tests.gpu.plan import TITLES, Wanted, plan
from tests.gpu.results import DONE, Outcome, is_good, markdown
from tests.gpu.rows import Row, heard
from tests.gpu.speed import phase_of
from tests.gpu.steps import Step, run_step
from tests.gpu.training import Task, nanogpt_training

ROOT = Path(__file__).parents[2]
ROW = '{"name": "seen", "passed": true, "figures": {"ms": 1.5}}'
NOT_ON_A_BARE_MACHINE = "prefect fsspec s3fs msgspec tokenizers pyarrow duckdb matplotlib safetensors pydantic_settings"
ON_A_BARE_MACHINE = f"""
import sys
for name in {NOT_ON_A_BARE_MACHINE!r}.split():
    sys.modules[name] = None
import tests.gpu.check, tests.gpu.bits, tests.gpu.speed, tests.gpu.two_processes, tests.gpu.machine
import cairn.tasks.trainer.staging_buffer
"""

LIKE_NANOGPT = """
import dataclasses, torch
GPTConfig = dataclasses.make_dataclass(
    "GPTConfig", "block_size vocab_size n_layer n_head n_embd dropout bias".split()
)
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
    def forward(self, ids, targets):
        logits = self.table(ids)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
"""


def step(script: str, *, seconds: float = 60.0, part: str = "a") -> Step:
    return Step(part=part, name="one", words=("sh", "-c", script), seconds=seconds)


def run(folder: Path, *steps: Step, seconds: float = 600.0) -> list[Outcome]:
    return check.run_steps(list(steps), folder, seconds=seconds)


def written(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "gpu-check.json").read_text())


def outcome(*rows: Row, ended: str = DONE) -> Outcome:
    return Outcome(part="b", step="one", ended=ended, seconds=1.0, rows=rows)


def test_a_step_killed_at_its_limit_leaves_what_it_had_found() -> None:
    killed = run_step(step(f"echo '{ROW}'; sleep 60 & wait"), seconds=1.0, log=io.StringIO())
    assert killed.ended == "killed at its limit of 1 s" and killed.rows[0].name == "seen"


def test_a_step_that_fails_says_its_last_line_and_the_next_is_run(tmp_path: Path) -> None:
    failed, after = run(tmp_path, step("echo cannot go on >&2; exit 3"), step(f"echo '{ROW}'"))
    assert failed.ended == "exit status 3: cannot go on" and after.rows[0].figures == {"ms": 1.5}
    assert not is_good([failed, after]) and is_good([after])


def test_both_files_are_there_while_the_next_step_runs(tmp_path: Path) -> None:
    look = f"grep -q seen {tmp_path}/gpu-check.md && grep -q seen {tmp_path}/gpu-check.json"
    assert [ended.ended for ended in run(tmp_path, step(f"echo '{ROW}'"), step(look))] == [DONE, DONE]


def test_what_there_is_no_time_for_is_not_begun_and_says_so(tmp_path: Path) -> None:
    run(tmp_path, step("exit 1"), seconds=check.LEAST_SECONDS - 1)
    assert "not begun: its time is over" in (tmp_path / "gpu-check.md").read_text()


def test_a_part_takes_no_time_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PART_SECONDS", {"a": 0.0, "b": 60.0})
    first, second = run(tmp_path, step("true"), step("true", part="b"))
    assert first.ended != DONE and second.ended == DONE


def test_a_row_is_heard_behind_other_words_but_not_cut_short() -> None:
    assert heard(ROW[:30]) is None and heard("a word") is None
    for before in ("", "pytest's dots ...s"):
        assert heard(before + ROW + "\n") == Row(name="seen", passed=True, figures={"ms": 1.5})


def test_the_report_shows_what_does_not_hold() -> None:
    report = markdown([outcome(Row(name="one", passed=False, figures={"said": "a|b"}))], TITLES)
    assert "| one | **no** | a/b |" in report and "## b. The same bits" in report
    assert not is_good([outcome(Row(name="one", passed=False))])


def test_parts_come_in_their_order_and_the_same_command_does_some() -> None:
    assert "".join(dict.fromkeys(step.part for step in plan(Wanted(), "abcde"))) == "abcde"
    assert {step.part for step in plan(Wanted(), "be")} == {"b", "e"}


def test_nanogpt_takes_part_where_its_folder_is_named() -> None:
    named = [[step.name for step in plan(wanted, "c")] for wanted in (Wanted(), Wanted(nanogpt=ROOT))]
    assert [any("nanogpt" in name for name in names) for names in named] == [False, True]


@pytest.fixture
def own_products() -> Iterator[None]:
    """The number format of products afterwards is that of before: it is part of a process's arithmetic."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("own_products")
def test_nanogpt_is_made_of_the_fields_that_it_knows_and_trains(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LIKE_NANOGPT)
    train, losses = nanogpt_training(Task(contender="nanogpt", recipe="tiny", device="cpu", batch=2, nanogpt=tmp_path))
    train(3)
    assert len(losses) == 2 and losses[-1] > 0


def test_the_bits_table_names_what_differs_and_who_failed() -> None:
    answers = {"whole": "one", "again": "one", "second": "other", "guarded": "failed: no memory"}
    assert [bits.verdict(answers, part) for part in bits.PARTS] == ["equal", "differs", "–", "failed: no memory"]


@pytest.mark.parametrize(
    ("kernel", "phase"),
    [
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("vectorized_elementwise_kernel", "rest"),
    ],
)
def test_a_kernel_has_the_phase_that_its_name_says(kernel: str, phase: str) -> None:
    assert phase_of(kernel) == phase


def test_what_travels_has_the_tried_versions_and_leaves_pytorch_at_home() -> None:
    names = [pinned.partition("==")[0] for pinned in wheels.needed()]
    assert f"prefect=={wheels.pins('run.txt')['prefect']}" in wheels.needed() and "pytest" in names
    assert not {"torch", "numpy", "pyarrow", "triton", "duckdb", "botocore"} & set(names)


@pytest.mark.slow  # beside: test_what_travels_has_the_tried_versions_and_leaves_pytorch_at_home
def test_bits_and_speed_need_no_more_than_a_bare_machine_with_pytorch_has() -> None:
    subprocess.run([sys.executable, "-c", ON_A_BARE_MACHINE], check=True, cwd=ROOT, timeout=240)


@pytest.mark.slow  # beside: the tests above, which run steps of their own
@pytest.mark.parametrize("part", TITLES)
def test_every_part_runs_on_a_cpu(tmp_path: Path, part: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.check", "--output", str(tmp_path), "--device", "cpu", "--tiny"]
    done = subprocess.run([*command, "--only", part, "--minutes", "14"], cwd=ROOT, timeout=880, capture_output=True)
    assert done.returncode == 0, (tmp_path / "gpu-check.md").read_text()
    assert all(said["rows"] for said in written(tmp_path))
