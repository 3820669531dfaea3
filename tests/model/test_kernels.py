"""Fused kernels: the same loss as the stock ones, the same bits in every process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.model.tiny_run import TinyRun

IN_ANOTHER_PROCESS = """
import sys
import torch
from cairn.model.training.determinism import make_deterministic
from tests.model.tiny_run import TinyRun
make_deterministic(seed=1, threads=1)
run = TinyRun(kernels="fused", precision="bf16", model={"dropout": 0.1, "block_size": 70})
run.train(5)
torch.save(run.tensors(), sys.argv[1])
"""


def test_fused_kernels_say_the_loss_of_the_stock_ones_at_the_first_step() -> None:
    stock, fused = (TinyRun(kernels=kernels).train(1)[0] for kernels in ("stock", "fused"))
    assert fused.train_loss == pytest.approx(stock.train_loss, rel=1e-6)
    assert fused.grad_norm == pytest.approx(stock.grad_norm, rel=1e-5)


def test_fused_kernels_keep_attention_within_documents() -> None:
    def first(kernels):
        run = TinyRun(kernels=kernels, precision="bf16", mask_documents=True)
        run.state.model.boundary_id = 7
        return run.train(1)[0]

    assert first("fused").train_loss == pytest.approx(first("stock").train_loss, rel=1e-3)


@pytest.mark.slow  # quick witness: test_same_bits_on_any_number_of_processes.py, whose ranks are processes of their own
def test_a_fused_run_begun_in_one_process_and_continued_in_another_ends_in_the_bits_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "state.pt")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    continued, whole = (
        TinyRun(kernels="fused", precision="bf16", model={"dropout": 0.1, "block_size": 70}) for _ in range(2)
    )
    continued.state.load(torch.load(tmp_path / "state.pt", weights_only=True))
    continued.train(12)
    whole.train(12)
    assert continued.bits() == whole.bits()


def test_a_probe_sees_the_network_in_fp32_whatever_kernels_train_it() -> None:
    run = TinyRun(kernels="fused", precision="bf16")
    tokens = torch.arange(16).view(2, 8)
    expected = TinyRun().state.model(tokens)
    assert torch.equal(run.state.model(tokens), expected)
