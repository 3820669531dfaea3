"""FLOPs, peak and memory."""

import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.estimates.utilization import (
    flops_per_token,
    measure_peak_flops,
    peak_flops,
    peak_source,
    read_memory_bytes,
)

CPU = torch.device("cpu")


def test_flops_are_six_for_each_parameter_that_works_and_the_attention() -> None:
    layers = 2 * (12 * 128**2 + 13 * 128) + 2 * 128
    attention = 12 * 2 * 128 * 64
    assert flops_per_token(ModelConfig(n_layer=2, n_embd=128, block_size=64), 10) == 6 * (layers + 1280) + attention


def test_an_untied_embedding_does_no_matrix_work() -> None:
    tied, untied = (ModelConfig(n_layer=2, n_embd=128, block_size=64, tied=tied) for tied in (True, False))
    assert flops_per_token(untied, 10) == flops_per_token(tied, 10)


def test_the_peak_is_measured_once_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    assert measure_peak_flops(CPU, "fp32") == measure_peak_flops(CPU, "fp32") > 1e6
    assert torch.equal(torch.get_rng_state(), before)


def test_mfu_on_a_cpu_is_a_share_of_the_measured_peak() -> None:
    assert (peak_flops(CPU, "fp32"), peak_source(CPU, "fp32")) == (measure_peak_flops(CPU, "fp32"), "measured")


def test_memory_of_this_process_is_more_than_a_megabyte() -> None:
    assert read_memory_bytes(CPU) > 2**20
