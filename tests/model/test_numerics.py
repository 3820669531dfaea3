"""Which arithmetic is chosen, and that the choice hangs on nothing but the network and one measured ratio."""

import itertools

import pytest
import torch

from model.configuration.network import ModelConfig
from model.configuration.training import TrainingConfig
from model.errors import InvalidInput
from model.estimates.numerics import MIN_BF16_GAIN, MIN_BF16_WIDTH, MachineSpeed, choose_numerics, describe_machine
from model.estimates.utilization import GAIN_PRODUCTS, GAIN_TURNS, measure_cpu_half_gain
from model.training.train_state import TrainState

HALF = MachineSpeed(cpu_half_gain=2.3)
EMULATED = MachineSpeed(cpu_half_gain=0.7)
CARD = MachineSpeed(has_cuda=True, cuda_has_half=True)
WIDE, NARROW = MIN_BF16_WIDTH["fused"], MIN_BF16_WIDTH["fused"] - 4


def chosen(machine, width=WIDE, **training):
    mode = choose_numerics(TrainingConfig(steps=1, **training), ModelConfig(n_embd=width), machine)
    return mode.precision, mode.kernels


@pytest.mark.parametrize(
    ("machine", "width", "expected"),
    [
        (HALF, WIDE, ("bf16", "fused")),
        (HALF, NARROW, ("fp32", "fused")),
        (EMULATED, 1024, ("fp32", "fused")),
        (MachineSpeed(), 1024, ("fp32", "fused")),
        (CARD, NARROW, ("bf16", "fused")),
        (MachineSpeed(has_cuda=True, cpu_half_gain=2.3), 1024, ("fp32", "fused")),
    ],
)
def test_the_default_is_the_fastest_arithmetic_with_promised_bits(machine, width, expected):
    assert chosen(machine, width) == expected


@pytest.mark.parametrize("said", [{"device": "cpu"}, {"device": "cpu", "precision": "auto", "kernels": "auto"}])
def test_a_run_on_the_cpu_is_not_chosen_for_by_the_card_beside_it(said):
    assert chosen(CARD, **said) == ("fp32", "fused")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"precision": "fp32"}, ("fp32", "fused")),
        ({"precision": "fp16"}, ("fp16", "stock")),
        ({"kernels": "stock"}, ("fp32", "stock")),  # alone, bf16 pays for wider networks only
        ({"compile": True}, ("fp32", "stock")),
        ({"precision": "bf16", "kernels": "stock"}, ("bf16", "stock")),
    ],
)
def test_what_is_said_stays_and_the_rest_fits_it(said, expected):
    assert chosen(HALF, **said) == expected


def test_a_card_compiles_the_fused_layers():
    assert chosen(CARD, compile=True) == ("bf16", "fused")


def test_whatever_is_chosen_is_a_configuration_that_stands():
    machines, precisions = (HALF, EMULATED, CARD), ("auto", "fp32", "bf16", "fp16")
    for machine, precision, compiled, width in itertools.product(machines, precisions, (False, True), (32, 512)):
        training = TrainingConfig(steps=1, precision=precision, compile=compiled)
        mode = choose_numerics(training, ModelConfig(n_embd=width), machine)
        said = {**training.model_dump(), "precision": mode.precision, "kernels": mode.kernels}
        assert "auto" not in (mode.precision, mode.kernels) and TrainingConfig(**said) and mode.why


def test_no_machine_is_near_the_border_between_those_with_half_precision_and_those_without():
    assert EMULATED.cpu_half_gain * 1.3 < MIN_BF16_GAIN < HALF.cpu_half_gain / 1.3


@pytest.mark.parametrize("gain", [-1.0, float("nan"), float("inf")])
def test_a_gain_that_no_measurement_gives_is_refused(gain):
    with pytest.raises(InvalidInput, match="cpu_half_gain"):
        MachineSpeed(cpu_half_gain=gain)


@pytest.mark.parametrize(("machine", "words"), [(HALF, "bf16 with fused"), (EMULATED, "fp32"), (CARD, "the CUDA")])
def test_people_are_told_in_a_line(machine, words):
    assert words in describe_machine(machine)


def test_one_disturbed_turn_changes_no_gain():
    # Each product of the one takes 3 s, of the other 2; one turn of each is held up by a minute.
    lasting = itertools.chain([0.0, 63.0, 0.0, 62.0], itertools.cycle([0.0, 3.0, 0.0, 2.0]))
    now = itertools.accumulate(lasting)
    assert measure_cpu_half_gain(clock=lambda: next(now)) == pytest.approx(1.5)


def test_a_probe_takes_a_number_of_products_and_leaves_the_threads_as_they_were():
    torch.set_num_threads(2)
    assert measure_cpu_half_gain() > 0 and torch.get_num_threads() == 2 and GAIN_TURNS * GAIN_PRODUCTS < 100


@pytest.mark.parametrize("left", [{"precision": "fp32"}, {"kernels": "stock"}])
def test_a_train_state_is_not_made_in_an_arithmetic_nobody_chose(left):
    with pytest.raises(InvalidInput, match="must be chosen"):
        TrainState.create(ModelConfig(n_embd=8), TrainingConfig(steps=1, **left), 9, torch.device("cpu"))
