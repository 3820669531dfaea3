"""The GPU benchmark tried without a GPU: what it needs, what it prints, and the whole program on a CPU."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.benchmarks import bench_gpu
from tests.benchmarks.gpu_turn import Stall, Turn

ROOT = Path(__file__).parents[2]
NOT_ON_A_BARE_MACHINE = "prefect fsspec s3fs msgspec tokenizers pyarrow duckdb matplotlib safetensors pydantic_settings"
ON_A_BARE_MACHINE = f"""
import sys
for name in {NOT_ON_A_BARE_MACHINE!r}.split():
    sys.modules[name] = None
import tests.benchmarks.bench_gpu, tasks.trainer.staging_buffer
"""
TURN = Turn(
    step_seconds=0.1, first_seconds=3.0, loss=4.5, peak_bytes=2**33, peak_flops=7.9e14, device_name="NVIDIA H200"
)


def arguments(*words):
    return bench_gpu.parser().parse_args([*words, "--batches", "16", "--rounds", "2"])


def answers(monkeypatch, answer):
    """Let children answer as `answer` says, and return what was asked of them."""
    asked = []

    def ask(task, kind, **said):
        asked.append((task.contender, kind, said.get("part", "")))
        return answer(task, kind, said)

    monkeypatch.setattr(bench_gpu, "ask", ask)
    return asked


def usual(task, kind, said):
    if kind == "turn":
        return asdict(TURN)
    if kind == "stall":
        return asdict(Stall(state_bytes=10**9, ours_seconds=0.022, plain_seconds=0.02))
    return "one" if said["part"] == "at-once" else "other"


@pytest.mark.slow
def test_a_bare_machine_with_pytorch_can_run_it():
    subprocess.run([sys.executable, "-c", ON_A_BARE_MACHINE], check=True, cwd=ROOT, timeout=120)


def test_the_report_gives_speed_and_both_utilizations(monkeypatch):
    answers(monkeypatch, usual)
    report = "\n".join(bench_gpu.lines(arguments("--contenders", "stock,fused", "--bits", "fused")))
    # 16 windows of 1,024 tokens in 0.1 s; 6 N + 12 L d T = 854 million operations a token.
    assert "| fused | 16 | 163,840 | 100.0 | 17.7% | 14.2% | 8.0 | 3.0 | 4.5000 |" in report
    assert "NVIDIA H200: bf16 products 790.0 TFLOP/s measured, data sheet 989." in report
    assert "nanoGPT did not take part" in report
    assert "1.00 GB to the host in 22.0 ms (45.5 GB/s), 1.10 × a plain copy" in report


def test_the_bits_table_names_what_differs(monkeypatch):
    asked = answers(monkeypatch, usual)
    table = bench_gpu.bits_lines(arguments("--bits", "fused"))
    assert table[-1] == "| fused | equal | equal | **differs** | equal |"
    assert [part for _, _, part in asked] == ["whole", "first", "again", "second", "at-once", "guarded"]


def test_who_fails_says_so_in_its_row_and_is_not_asked_again(monkeypatch):
    def answer(task, kind, said):
        fails = task.contender == "stock"
        return bench_gpu.Failure(why="out of memory") if fails else usual(task, kind, said)

    asked = answers(monkeypatch, answer)
    report = bench_gpu.lines(arguments("--contenders", "stock,fused", "--bits", "stock,fused"))
    assert "| stock | 16 | failed: out of memory | | | | | | |" in report
    assert f"| stock |{' failed: out of memory |' * 4}" in report
    assert [name for name, kind, _ in asked if kind == "turn"].count("stock") == 1
    assert [name for name, kind, _ in asked if kind == "turn"].count("fused") == 2


def test_contenders_take_turns_and_nobody_is_always_first(monkeypatch):
    asked = answers(monkeypatch, usual)
    bench_gpu.take_turns(arguments(), ["a", "b", "c"])
    assert [name for name, _, _ in asked] == ["a", "b", "c", "b", "c", "a"]


@pytest.mark.slow
def test_the_whole_program_runs_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks.bench_gpu", "--device", "cpu", "--tiny", "--rounds", "1"]
    chosen = ["--contenders", "stock,fused", "--bits", "fused", "--output", str(tmp_path / "report.md")]
    subprocess.run([*command, *chosen], check=True, cwd=ROOT, timeout=280)
    report = (tmp_path / "report.md").read_text()
    assert "failed" not in report
    assert "| fused | equal | equal | equal | equal |" in report
