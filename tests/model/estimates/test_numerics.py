"""Which numerics are chosen: a pure function of the network and one measured ratio."""

import itertools

import pytest
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.errors import InvalidInput
from cairn.model.estimates import utilization
from cairn.model.estimates.numerics import (
    MIN_BF16_GAIN,
    MIN_BF16_WIDTH,
    MachineSpeed,
    choose_numerics,
    describe_machine,
)
from cairn.model.estimates.utilization import GAIN_PRODUCTS, GAIN_TURNS, measure_cpu_half_gain
from cairn.model.training.train_state import TrainState

HALF = MachineSpeed(cpu_half_gain=2.3)
EMULATED = MachineSpeed(cpu_half_gain=0.7)
GPU = MachineSpeed(has_cuda=True, cuda_has_half=True)
WIDE, NARROW = MIN_BF16_WIDTH["fused"], MIN_BF16_WIDTH["fused"] - 4


def chosen(machine, width=WIDE, **training):
    choice = choose_numerics(TrainingConfig(steps=1, **training), ModelConfig(n_embd=width), machine)
    return choice.precision, choice.kernels


@pytest.mark.parametrize(
    ("machine", "width", "expected"),
    [
        (HALF, WIDE, ("bf16", "fused")),
        (HALF, NARROW, ("fp32", "fused")),
        (EMULATED, 1024, ("fp32", "fused")),
        (MachineSpeed(), 1024, ("fp32", "fused")),
        (GPU, NARROW, ("bf16", "fused")),
        (MachineSpeed(has_cuda=True, cpu_half_gain=2.3), 1024, ("fp32", "fused")),
    ],
)
def test_the_default_is_the_fastest_reproducible_numerics(machine, width, expected) -> None:
    assert chosen(machine, width) == expected


@pytest.mark.parametrize("explicit", [{"device": "cpu"}, {"device": "cpu", "precision": "auto", "kernels": "auto"}])
def test_an_unused_gpu_does_not_affect_a_run_on_the_cpu(explicit) -> None:
    assert chosen(GPU, **explicit) == ("fp32", "fused")


@pytest.mark.parametrize(
    ("explicit", "expected"),
    [
        ({"precision": "fp32"}, ("fp32", "fused")),
        ({"precision": "fp16"}, ("fp16", "stock")),
        ({"kernels": "stock"}, ("fp32", "stock")),  # alone, bf16 pays for wider networks only
        ({"compile": True}, ("fp32", "stock")),
        ({"precision": "bf16", "kernels": "stock"}, ("bf16", "stock")),
    ],
)
def test_explicit_values_stay_and_the_others_fit_them(explicit, expected) -> None:
    assert chosen(HALF, **explicit) == expected


def test_apples_gpu_gets_what_is_surest() -> None:
    assert chosen(MachineSpeed(cpu_half_gain=9.0), device="mps") == ("fp32", "stock")


def test_a_gpu_compiles_the_fused_layers() -> None:
    assert chosen(GPU, compile=True) == ("bf16", "fused")


def test_every_choice_is_a_valid_configuration() -> None:
    machines, precisions = (HALF, EMULATED, GPU), ("auto", "fp32", "bf16", "fp16")
    for machine, precision, compiled, width in itertools.product(machines, precisions, (False, True), (32, 512)):
        training = TrainingConfig(steps=1, precision=precision, compile=compiled)
        choice = choose_numerics(training, ModelConfig(n_embd=width), machine)
        explicit = {**training.model_dump(), "precision": choice.precision, "kernels": choice.kernels}
        assert "auto" not in (choice.precision, choice.kernels) and TrainingConfig(**explicit) and choice.why


def test_both_kinds_of_machine_are_far_from_the_threshold() -> None:
    assert EMULATED.cpu_half_gain * 1.3 < MIN_BF16_GAIN < HALF.cpu_half_gain / 1.3


@pytest.mark.parametrize(("machine", "words"), [(HALF, "bf16 with fused"), (EMULATED, "fp32"), (GPU, "the CUDA")])
def test_a_machine_is_described_in_one_line(machine, words) -> None:
    assert words in describe_machine(machine)


@pytest.fixture
def tiny_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that take no time where half precision is emulated."""
    monkeypatch.setattr(utilization, "_GAIN_MATRIX_SIZE", 8)


@pytest.mark.usefixtures("tiny_products")
def test_one_disturbed_turn_changes_no_gain() -> None:
    # Each product of the one takes 3 s, of the other 2; one turn of each is held up by a minute.
    lasting = itertools.chain([0.0, 63.0, 0.0, 62.0], itertools.cycle([0.0, 3.0, 0.0, 2.0]))
    now = itertools.accumulate(lasting)
    assert measure_cpu_half_gain(clock=lambda: next(now)) == pytest.approx(1.5)


@pytest.mark.usefixtures("tiny_products")
def test_the_measurement_is_bounded_and_restores_the_thread_count() -> None:
    torch.set_num_threads(2)
    assert measure_cpu_half_gain() > 0 and torch.get_num_threads() == 2 and GAIN_TURNS * GAIN_PRODUCTS < 100


@pytest.mark.parametrize("left", [{"precision": "fp32"}, {"kernels": "stock"}])
def test_a_train_state_refuses_auto_numerics(left) -> None:
    with pytest.raises(InvalidInput, match="must be chosen"):
        TrainState.create(ModelConfig(n_embd=8), TrainingConfig(steps=1, **left), 9, torch.device("cpu"))
