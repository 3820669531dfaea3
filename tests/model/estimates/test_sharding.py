"""Two sharded processes: what they exchange, in which numbers, and that equal numbers of them give equal bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.model.estimates.size_estimate import count_parameters
from tests.model.rank_legs import Leg, probe, read_seen, read_state, train_legs
from tests.model.tiny_run import VOCAB, TinyRun

STEPS = 2
SHARDED: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "steps": 12, "parallel": "fsdp"}
RUNS: dict[str, dict[str, Any]] = {
    "fp32 stock": {},
    "fp32 fused": {"kernels": "fused"},
    "bf16 stock": {"precision": "bf16"},
    "bf16 fused": {"precision": "bf16", "kernels": "fused"},
    "recomputed": {"precision": "bf16", "kernels": "fused", "activation_checkpointing": True},
    "uneven": {"global_batch": 9, "micro_batch": 4},
}
EMPTY: dict[str, dict[str, Any]] = {
    "1 window, fp32 stock": {"global_batch": 1},
    "1 window, fp16": {"global_batch": 1, "precision": "fp16"},
    "3 windows, recomputed": {"global_batch": 3, **RUNS["recomputed"]},
}
"""Batches of which one of two processes has a window less than the other has micro-batches."""
ALONE = (4, 5)
"""The shares of two processes in the uneven batch, each trained by one process."""


COMPILED = {
    f"{precision} compiled{again}": {"precision": precision, "kernels": "fused", "compile": True}
    for precision in ("fp32", "bf16")
    for again in ("", " again")
}


def legs_of(runs: dict[str, dict[str, Any]], folder: Path) -> list[Leg]:
    return [
        Leg(size=2, until_step=STEPS, settings={**SHARDED, **settings}, end=str(folder / f"{name}.npz"))
        for name, settings in runs.items()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every run left its state, all trained by the same two processes."""
    folder = tmp_path_factory.mktemp("sharded")
    legs = legs_of(RUNS | {name: {"micro_batch": 1, **settings} for name, settings in EMPTY.items()}, folder)
    for rows in ALONE:
        settings = {"global_batch": rows, "steps": 12}
        legs.append(Leg(size=1, until_step=STEPS, settings=settings, end=str(folder / f"{rows} alone.npz")))
    train_legs(legs, processes=2)
    return folder


def state(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return read_state(folder / f"{name}.npz")


def utilization(folder: Path, name: str) -> float:
    """The MFU of the last step; every step takes the same time by the legs' clock."""
    return float(read_seen(folder / f"{name}.npz")["records"][-1]["mfu"])


def layer_numbers() -> int:
    run = TinyRun()
    whole = count_parameters(run.model_config, VOCAB)
    return whole - (VOCAB + run.model_config.block_size + 2) * run.model_config.n_embd


def test_uneven_shares_complete(folder: Path) -> None:
    assert int(state(folder, "uneven")["step"]) == STEPS


@pytest.mark.parametrize("kernels", ["stock", "fused"])
def test_layers_are_gathered_in_the_numbers_that_they_are_computed_in(folder: Path, kernels: str) -> None:
    exact, low = (read_seen(folder / f"{precision} {kernels}.npz")["exchanged"] for precision in ("fp32", "bf16"))
    assert exact.keys() == {"allgather_base float32", "reduce_scatter_base float32"}
    assert low["allgather_base bfloat16"] % (2 * layer_numbers()) == 0
    layers = 2 * low["allgather_base bfloat16"]
    assert exact["allgather_base float32"] == low["allgather_base float32"] + layers


def test_gradients_are_added_up_in_fp32(folder: Path) -> None:
    exact, low = (read_seen(folder / f"{run}.npz")["exchanged"] for run in ("fp32 fused", "bf16 fused"))
    name = "reduce_scatter_base float32"
    assert low[name] == exact[name] and [key for key in low if key.startswith("reduce")] == [name]


def test_equal_numbers_of_processes_give_equal_bits_their_activations_kept_or_computed_again(folder: Path) -> None:
    first, second = state(folder, "bf16 fused"), state(folder, "recomputed")
    assert {key: value.numpy().tobytes() for key, value in first.items()} == {
        key: value.numpy().tobytes() for key, value in second.items()
    }


def test_a_sharded_run_learns_what_one_process_learns(folder: Path) -> None:
    alone = TinyRun(**{**SHARDED, **RUNS["fp32 fused"], "parallel": "ddp"})
    expected = [record.train_loss for record in alone.train(STEPS)]
    seen = read_seen(folder / "fp32 fused.npz")["records"]
    assert [record["train_loss"] for record in seen] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", EMPTY)
def test_a_process_without_a_window_contributes_nothing(folder: Path, name: str) -> None:
    alone = TinyRun(**{**SHARDED, "micro_batch": 1, **EMPTY[name], "parallel": "ddp"})
    expected = [record.train_loss for record in alone.train(STEPS)]
    seen, rounding = read_seen(folder / f"{name}.npz")["records"], 1e-5 if "fp32" in name else 1e-3
    assert [record["train_loss"] for record in seen] == pytest.approx(expected, rel=rounding)


@pytest.mark.parametrize("kernels", ["stock", "fused"])
def test_a_probe_of_layers_gathered_in_half_precision_differs_by_its_rounding_alone(folder: Path, kernels: str) -> None:
    alone = TinyRun(global_batch=8)
    alone.state.load(state(folder, f"bf16 {kernels}"))
    measured, text = read_seen(folder / f"bf16 {kernels}.npz")["probe"]
    assert text and measured == pytest.approx(probe(alone)[0], rel=1e-3)


def test_the_utilization_of_two_processes_is_the_mean_of_what_each_would_say_alone(folder: Path) -> None:
    alone = [utilization(folder, f"{rows} alone") for rows in ALONE]
    assert utilization(folder, "uneven") == pytest.approx(sum(alone) / len(alone), rel=1e-9)


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Path:
    """Where the runs with compiled layers left their states too."""
    train_legs(legs_of(COMPILED, folder), processes=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_and_sharded_layers_learn_what_sharded_ones_learn(compiled: Path, precision: str) -> None:
    """What the compiler is asked for, without it, is seen in test_compilation."""
    expected, got = (
        [record["train_loss"] for record in read_seen(compiled / f"{precision} {name}.npz")["records"]]
        for name in ("fused", "compiled")
    )
    assert got == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_and_sharded_layers_give_equal_bits_in_equal_processes(compiled: Path, precision: str) -> None:
    first, again = (state(compiled, f"{precision} compiled{which}") for which in ("", " again"))
    assert all(bool(values.isfinite().all()) for values in first.values())
    assert {key: value.numpy().tobytes() for key, value in first.items()} == {
        key: value.numpy().tobytes() for key, value in again.items()
    }
