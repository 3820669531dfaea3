"""FLOPs, peak and memory; names as drivers give them have their own rate, and no other."""

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates.utilization import (
    flops_per_token,
    measure_peak_flops,
    peak_flops,
    peak_flops_of_device,
    peak_source,
    read_memory_bytes,
)
from cairn.model.training.train_state import TrainState
from tests.programs.benchmarks import bench_step
from tests.programs.gpu import speed
from tests.programs.gpu.training import Task, recipe_of

CPU = torch.device("cpu")


def test_flops_are_six_for_each_parameter_that_works_and_the_attention() -> None:
    layers = 2 * (12 * 128**2 + 13 * 128) + 2 * 128
    attention = 12 * 2 * 128 * 64
    assert (
        flops_per_token(ModelConfig(n_layer=2, n_embd=128, block_size=64), vocab_size=10)
        == 6 * (layers + 1280) + attention
    )


def test_an_untied_embedding_does_no_matrix_work() -> None:
    tied, untied = (ModelConfig(n_layer=2, n_embd=128, block_size=64, tied=tied) for tied in (True, False))
    assert flops_per_token(untied, vocab_size=10) == flops_per_token(tied, vocab_size=10)


def test_the_peak_is_measured_once_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    assert measure_peak_flops(CPU, "fp32") == measure_peak_flops(CPU, "fp32") > 1e6
    assert torch.equal(torch.get_rng_state(), before)


def test_mfu_on_a_cpu_is_a_share_of_the_measured_peak() -> None:
    assert (peak_flops(CPU, "fp32"), peak_source(CPU, "fp32")) == (measure_peak_flops(CPU, "fp32"), "measured")


def test_memory_of_this_process_is_more_than_a_megabyte() -> None:
    assert read_memory_bytes(CPU) > 2**20


def counted_flops(config: ModelConfig, vocab_size: int, batch: int) -> int:
    """Return what torch counts in one forward and backward pass."""
    training_config = TrainingConfig(steps=1, lr=1.0, min_lr=1.0, kernels="stock", precision="fp32")
    model = TrainState.create(config, training_config, vocab_size, CPU).model
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, config.block_size, dtype=torch.int64)).sum().backward()  # (N, T) -> (N, T, V)
    return int(counter.get_total_flops())


def test_the_step_benchmark_divides_by_the_flops_that_torch_counts() -> None:
    chosen = bench_step.RECIPES["small"]
    counted = counted_flops(chosen.model, chosen.vocab_size, 2)
    assert bench_step.flops_of_step(chosen, 2) == pytest.approx(counted, rel=0.15)


def test_the_gpu_check_divides_by_the_flops_that_torch_counts() -> None:
    task, chosen = Task(contender="stock", recipe="tiny", device="cpu", batch=2), recipe_of("tiny")
    counted = counted_flops(chosen.model, chosen.vocab_size, 2)
    assert speed.flops_of_step(task) == pytest.approx(counted, rel=0.15)


def test_no_step_of_the_gpu_check_uses_more_than_the_machine_has() -> None:
    train, _ = speed.contender(task := Task(contender="fp32", recipe="tiny", device="cpu", batch=2))
    began = time.perf_counter()
    train(1)
    shares = speed.rates(task, time.perf_counter() - began, measure_peak_flops(CPU, "fp32"))
    assert 0 < (shares["of_measured"] or 0) < 100


AS_DRIVERS_SAY = {
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H20": 148.0,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA A100-SXM4-80GB": 311.8,
    "NVIDIA A100 80GB PCIe": 311.8,
    "NVIDIA A10G": 70.0,
    "NVIDIA A10": 125.0,
    "NVIDIA L40S": 362.1,
    "NVIDIA L4": 121.0,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 4090": 165.2,
}


@pytest.mark.parametrize("name", AS_DRIVERS_SAY)
def test_a_device_has_the_rate_of_its_own_specification(name) -> None:
    assert peak_flops_of_device(name, "bf16") == pytest.approx(AS_DRIVERS_SAY[name] * 1e12)
    assert peak_flops_of_device(name, "fp16") == peak_flops_of_device(name, "bf16")


@pytest.mark.parametrize("name", ["NVIDIA H2000", "NVIDIA GeForce GTX 1080", "NVIDIA A1000 Laptop GPU", "cpu", ""])
def test_an_unlisted_device_has_no_rate(name) -> None:
    assert peak_flops_of_device(name, "bf16") is None


def test_older_devices_have_a_rate_in_fp16_alone() -> None:
    assert peak_flops_of_device("Tesla T4", "fp16") == 65e12
    assert peak_flops_of_device("Tesla V100-SXM2-16GB", "fp16") == 125e12
    assert peak_flops_of_device("Tesla T4", "bf16") is None


def test_fp32_has_no_rate_of_the_matrix_units() -> None:
    assert peak_flops_of_device("NVIDIA H200", "fp32") is None
