"""The GPU check tried without a GPU: its limits, what it writes, and, part by part, the whole program on a CPU."""

import argparse
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.processes.waiting import wait_until
from tests.programs.gpu import bits, check, wheels
from tests.programs.gpu.plan import TITLES, Wanted, plan
from tests.programs.gpu.results import CUT_OFF, DONE, NOT_BEGUN, Outcome, is_good, markdown, read_results
from tests.programs.gpu.rows import Row, heard
from tests.programs.gpu.speed import has_time, phase_of
from tests.programs.gpu.steps import Step, run_step
from tests.programs.gpu.training import Task, nanogpt_training

ROOT = Path(__file__).parents[2]
ROW = '{"name": "seen", "passed": true, "figures": {"ms": 1.5}}'
NOT_ON_A_BARE_MACHINE = "prefect fsspec s3fs msgspec tokenizers pyarrow duckdb matplotlib safetensors pydantic_settings"
ON_A_BARE_MACHINE = f"""
import sys
for name in {NOT_ON_A_BARE_MACHINE!r}.split():
    sys.modules[name] = None
from tests.programs.gpu import bits, check, machine, speed, two_processes
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


def step(script: str, *, part: str = "a", **more: Any) -> Step:
    return Step(part=part, name="one", words=("sh", "-c", script), seconds=60.0, **more)


def run(folder: Path, *steps: Step, seconds: float = 600.0) -> list[Outcome]:
    return check.run_steps(list(steps), folder, seconds=seconds)


def written(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "gpu-check.json").read_text())


def outcome(*rows: Row, ended: str = DONE) -> Outcome:
    return Outcome(part="b", step="one", ended=ended, seconds=1.0, rows=rows)


def test_a_step_killed_at_its_limit_leaves_what_it_had_found() -> None:
    killed = run_step(step(f"echo '{ROW}'; sleep 60 & wait"), seconds=1.0, log=io.StringIO())
    assert killed.ended == "killed at its limit of 1 s" and killed.rows[0].name == "seen"


def test_a_step_killed_at_its_limit_takes_along_what_left_its_group() -> None:
    killed = run_step(step("setsid sleep 60 & echo $!; wait"), seconds=2.0, log=(log := io.StringIO()))
    left = int(log.getvalue())

    def has_ended() -> bool:
        try:
            return psutil.Process(left).status() == psutil.STATUS_ZOMBIE  # until its new parent looks
        except psutil.NoSuchProcess:
            return True

    wait_until(has_ended, "its end")
    assert killed.ended.startswith("killed")


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


def test_what_was_not_begun_is_no_failure() -> None:
    assert is_good([outcome(ended=NOT_BEGUN)])


def test_a_measurement_is_cut_off_and_keeps_its_figures_but_not_without_one() -> None:
    cut = run_step(step(f"echo '{ROW}'; sleep 60 & wait", measures=True), seconds=1.0, log=io.StringIO())
    assert cut.ended == CUT_OFF and is_good([cut]) and not is_good([outcome(ended=CUT_OFF)])


def test_a_step_knows_its_limit() -> None:
    limited = run_step(step("exit $GPU_CHECK_STEP_SECONDS"), seconds=7, log=io.StringIO())
    assert limited.ended.startswith("exit status 7")


def test_a_command_for_one_part_keeps_what_another_found(tmp_path: Path) -> None:
    run(tmp_path, step("exit 1"), step(f"echo '{ROW}'", part="b"))
    run(tmp_path, step(f"echo '{ROW}'"))
    assert [(one.part, one.ended) for one in read_results(tmp_path)] == [("a", DONE), ("b", DONE)]


def test_every_part_is_under_ten_minutes_and_forty_leave_time_for_the_last() -> None:
    parts = {part: sum(step.seconds for step in plan(Wanted(nanogpt=ROOT), part)) for part in TITLES}
    assert max(parts.values()) < 580 and sum(parts.values()) - parts["f"] <= 2400 - 400
    assert check.parser().parse_args(["--output", "."]).minutes == 40


def test_shorter_turns_come_first() -> None:
    for part in "cf":
        seconds = [step.seconds for step in plan(Wanted(nanogpt=ROOT), part) if "any-order" not in step.name]
        assert seconds[0] == min(seconds)


@pytest.mark.parametrize(
    ("spent", "last", "is_begun"), [(0, 0, True), (20, 10, True), (40, 12, False), (20, 30, False)]
)
def test_a_batch_size_is_begun_where_it_can_end(spent: float, last: float, is_begun: bool) -> None:
    assert has_time(spent, last, 60) == is_begun


GIB = 2**30


@pytest.mark.parametrize(
    ("needed", "running", "free", "most", "may_run"),
    [
        (8, [], 79, 12, True),
        (200, [], 79, 12, True),  # alone it may try
        (8, [8] * 8, 79, 12, True),
        (8, [8] * 9, 79, 12, False),  # an H100 is full
        (8, [8] * 9, 139, 12, True),  # an H200 is not
        (1, [1] * 12, 139, 12, False),  # but its cores are
        (17, [17] * 3, 79, 12, True),
        (17, [17] * 4, 79, 12, False),
        (8, [17] * 4, 79, 12, True),  # a smaller one beside them is
        (8, [17] * 4, 75, 12, False),
        (1, [1], 0, 12, False),
    ],
)
def test_processes_run_beside_each_other_as_far_as_memory_goes(
    needed: int, running: list[int], free: int, most: int, may_run: bool
) -> None:
    sizes = [size * GIB for size in running]
    assert bits.fits(needed * GIB, sizes, free_bytes=free * GIB, most=most) == may_run


def test_a_process_waits_until_another_has_left_its_room() -> None:
    room, came = bits.Room(free_bytes=10, most=2), threading.Event()

    def enter() -> None:
        with room.taken(6):
            came.set()

    with room.taken(6):
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert room.running == [6]
    waiting.join(10)
    assert came.is_set() and room.running == []


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", bits.OUT_OF_MEMORY),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", bits.OUT_OF_MEMORY),
        ("CUDA out of memory\nValueError: no such mode", "failed: ValueError: no such mode"),
        ("", "failed: exit status 3"),
    ],
)
def test_want_of_memory_has_its_own_name(said: str, reason: str) -> None:
    assert bits.reason_of(said, 3) == reason


@pytest.mark.parametrize(
    ("verdicts", "passed"),
    [
        (["equal", "–"], True),
        (["equal", bits.NO_TIME], None),
        (["equal", "differs", bits.NO_TIME], False),
        (["equal", bits.OUT_OF_MEMORY], False),
    ],
)
def test_time_that_is_over_is_no_failure_of_bits(verdicts: list[str], passed: bool | None) -> None:
    assert bits.holds(verdicts) is passed


def test_what_lacked_memory_is_asked_again_alone_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = list[str](), iter([bits.OUT_OF_MEMORY, "one"])

    def ask(given: object, mode: str, part: str, folder: Path) -> str:
        asked.append(part)
        return next(answers) if part == "first" else "one"

    monkeypatch.setattr(bits, "ask", ask)
    room = bits.Room(free_bytes=0, most=1)
    short = bits.one_mode(argparse.Namespace(), room, tmp_path, "fp16", 1, {})
    assert sorted(asked) == ["again", "at-once", "first", "whole"] and short["second"] == bits.OUT_OF_MEMORY
    whole = bits.one_mode(argparse.Namespace(), room, tmp_path, "fp16", 1, short)
    assert asked[4:] == ["first", "second"] and set(whole.values()) == {"one"}


def test_every_mode_has_an_estimate_of_its_memory() -> None:
    for mode in bits.MODES:
        task = Task(contender=mode, recipe="gpt2", device="cuda", batch=4)
        assert 4 * GIB < bits.needed_bytes(task) < 20 * GIB


def test_a_row_is_heard_behind_other_words_but_not_cut_short() -> None:
    assert heard(ROW[:30]) is None and heard("a word") is None
    for before in ("", "pytest's dots ...s"):
        assert heard(before + ROW + "\n") == Row(name="seen", passed=True, figures={"ms": 1.5})


def test_the_report_shows_what_does_not_hold() -> None:
    report = markdown([outcome(Row(name="one", passed=False, figures={"said": "a|b"}))], TITLES)
    assert "| one | **no** | a/b |" in report and "## b. The same bits" in report
    assert not is_good([outcome(Row(name="one", passed=False))])


def test_parts_come_in_their_order_and_the_same_command_does_some() -> None:
    assert "".join(dict.fromkeys(step.part for step in plan(Wanted(), "abcdef"))) == "abcdef"
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
    answers = {"whole": "one", "again": "one", "second": "other", "guarded": bits.OUT_OF_MEMORY}
    assert [bits.verdict(answers, part) for part in bits.PARTS] == ["equal", "differs", "–", "out of memory"]


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
    command = [sys.executable, "-m", "tests.programs.gpu.check", "--output", str(tmp_path), "--device", "cpu", "--tiny"]
    done = subprocess.run([*command, "--only", part, "--minutes", "14"], cwd=ROOT, timeout=880, capture_output=True)
    assert done.returncode == 0, (tmp_path / "gpu-check.md").read_text()
    assert all(said["rows"] for said in written(tmp_path))
