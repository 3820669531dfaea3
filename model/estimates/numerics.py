"""In which arithmetic a new run trains: the fastest whose bits are promised, for its network on this kind of machine.

Owns the rule from what a machine was measured at to `precision` and `kernels`. Refuses torch, clocks and files, so
that the same network on the same machine always gives the same answer: what is measured is one ratio with a wide gap
between the machines that multiply bf16 in hardware (2 and more) and those that do not (1 and less), while which
networks are wide enough is a table. Timing whole steps instead would be near a tie exactly where widths begin to pay,
and there two runs of one configuration would part by noise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from model.configuration.network import ModelConfig
from model.configuration.training import Kernels, Precision, TrainingConfig
from model.errors import InvalidInput

CLEAR_GAIN = 1.4
"""How many times as fast bf16 products must be: hardware gives 2 and more on a CPU, its emulation 1 and less."""
NARROWEST_HALF: Mapping[Kernels, int] = {"fused": 128, "stock": 256}
"""The width from which bf16 pays on a CPU: below, casts and calls cost what the products save. Measured, for 12
windows of 64 tokens, as fp32's seconds of a core over those of bf16: fused 1.0 (32 and 64 wide), 1.2 (96), 1.5 (128),
1.7 (256); stock 0.7 (32, 64, 96), 0.9 (128), 1.2 (192), 1.4 (256). In fp32 fused kernels are as fast as stock ones
there, and hold no more logits than a chunk.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSpeed:
    """What was found out about a machine: whether torch has a CUDA device, and if that multiplies bf16 by itself.

    `cpu_half_gain` is the time of a product in fp32 over its time in bf16, on one core; 0 where it was not measured.
    """

    has_cuda: bool = False
    cuda_has_half: bool = False
    cpu_half_gain: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a gain that no measurement gives."""
        if not (math.isfinite(self.cpu_half_gain) and self.cpu_half_gain >= 0):
            raise InvalidInput(f"cpu_half_gain={self.cpu_half_gain} must be a finite number of at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsChoice:
    """The arithmetic of a run, nothing left open, and for people the reason."""

    precision: Precision
    kernels: Kernels
    why: str


def is_open(training: TrainingConfig) -> bool:
    """Whether the configuration leaves any of it to Cairn."""
    return "auto" in (training.precision, training.kernels)


def cpu_half_can_pay(training: TrainingConfig, model: ModelConfig) -> bool:
    """Whether the machine's half precision matters at all to a network of this shape on a CPU."""
    return model.n_embd >= NARROWEST_HALF[_kernels(training)]


def choose_numerics(training: TrainingConfig, model: ModelConfig, machine: MachineSpeed) -> NumericsChoice:
    """Fill in what the configuration leaves open; what it says stays as it is."""
    on_cuda = training.device.startswith("cuda") or (training.device == "auto" and machine.has_cuda)
    precision, why = training.precision, "as configured"
    if precision == "auto":
        precision, why = _cuda_precision(machine) if on_cuda else _cpu_precision(training, model, machine)
    return NumericsChoice(precision=precision, kernels=_kernels(training, on_cuda=on_cuda), why=why)


def describe_machine(machine: MachineSpeed) -> str:
    """Say in one line what new runs on this machine train in when their configuration leaves it to Cairn."""
    if machine.has_cuda:
        precision, why = _cuda_precision(machine)
        return f"{precision} with fused kernels: {why}"
    gain = f"its bf16 products are {machine.cpu_half_gain:.1f} times as fast as its fp32 ones"
    if machine.cpu_half_gain < CLEAR_GAIN:
        return f"fp32 with fused kernels: {gain}" if machine.cpu_half_gain else "fp32 with fused kernels"
    return f"bf16 with fused kernels, fp32 for networks under {NARROWEST_HALF['fused']} wide: {gain}"


def _kernels(training: TrainingConfig, *, on_cuda: bool = False) -> Kernels:
    if training.kernels != "auto":
        return training.kernels
    # On a CPU the compiler gains nothing over the fused kernels and would take them apart.
    return "stock" if training.precision == "fp16" or (training.compile and not on_cuda) else "fused"


def _cuda_precision(machine: MachineSpeed) -> tuple[Precision, str]:
    if machine.cuda_has_half:
        return "bf16", "the CUDA device multiplies bf16"
    return "fp32", "the CUDA device does not multiply bf16 by itself"


def _cpu_precision(training: TrainingConfig, model: ModelConfig, machine: MachineSpeed) -> tuple[Precision, str]:
    if not cpu_half_can_pay(training, model):
        narrowest = NARROWEST_HALF[_kernels(training)]
        return "fp32", f"on a CPU bf16 pays for networks at least {narrowest} wide, this one has {model.n_embd}"
    if machine.cpu_half_gain >= CLEAR_GAIN:
        return "bf16", f"this CPU's bf16 products are {machine.cpu_half_gain:.1f} times as fast as its fp32 ones"
    if not machine.cpu_half_gain:
        return "fp32", "this CPU was not found to multiply bf16"
    return "fp32", f"this CPU's bf16 products are {machine.cpu_half_gain:.1f} times as fast, {CLEAR_GAIN} are asked for"
