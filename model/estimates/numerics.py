"""Chooses `precision` and `kernels` of a new run: the fastest reproducible arithmetic on its machine.

Imports no torch. Margins are wide, so that two runs of one configuration do not differ: of bf16 hardware one ratio is
measured, where whole steps would tie at the crossover width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import Kernels, Precision, TrainingConfig
from cairn.model.errors import InvalidInput

MIN_BF16_GAIN = 1.4
"""How many times as fast as fp32 bf16 products must be: hardware gives 2 or more on a CPU, emulation 1 or less."""
MIN_BF16_WIDTH: Mapping[Kernels, int] = {"fused": 128, "stock": 256}
"""The smallest width at which bf16 is faster on a CPU; below it, casts cost what the products save. Measured speedups
for 12 windows of 64 tokens: fused 1.0 (32 and 64 wide), 1.2 (96), 1.5 (128), 1.7 (256); stock 0.7 (32 to 96), 0.9
(128), 1.2 (192), 1.4 (256). In fp32 fused kernels are as fast as stock ones and take less memory.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSpeed:
    """Measured facts: whether there is CUDA with bf16 hardware, and a core's fp32 time over its bf16 time, or 0."""

    has_cuda: bool = False
    cuda_has_half: bool = False
    cpu_half_gain: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.cpu_half_gain < float("inf"):
            raise InvalidInput(f"cpu_half_gain={self.cpu_half_gain} must be a finite number of at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsChoice:
    """The arithmetic of a run, with no `auto` left, and the reason in words."""

    precision: Precision
    kernels: Kernels
    why: str


def benefits_from_cpu_bf16(training: TrainingConfig, model: ModelConfig) -> bool:
    """Whether a network of this width trains faster on a CPU with bf16 hardware; a module's width is not known."""
    return not model.module and model.n_embd >= _narrowest(training)


def choose_numerics(training: TrainingConfig, model: ModelConfig, machine: MachineSpeed) -> NumericsChoice:
    """Replace each `auto` of the configuration; explicit values stay."""
    on_cuda = training.device.startswith("cuda") or (training.device == "auto" and machine.has_cuda)
    kernels: Kernels = "stock" if model.module else _kernels(training, on_cuda=on_cuda)
    precision, gain = training.precision, machine.cpu_half_gain
    products = f"this CPU's bf16 products are {gain:.1f} times as fast as its fp32 ones"
    if training.device == "mps":
        precision = "fp32" if precision == "auto" else precision
        kernels = "stock" if training.kernels == "auto" else training.kernels
        why = "nothing else was ever measured on mps"
    elif precision != "auto":
        why = "as configured"
    elif on_cuda:
        precision, why = _cuda_precision(machine)
    elif model.module:
        precision, why = "fp32", "the width of a module is not known"
    elif not benefits_from_cpu_bf16(training, model):
        wide = f"at least {_narrowest(training)} wide, this one has {model.n_embd}"
        precision, why = "fp32", f"on a CPU bf16 pays for networks {wide}"
    elif gain >= MIN_BF16_GAIN:
        precision, why = "bf16", products
    else:
        slow = f"{products}, {MIN_BF16_GAIN} are required"
        precision, why = "fp32", slow if gain else "no bf16 hardware was measured on this CPU"
    return NumericsChoice(precision=precision, kernels=kernels, why=why)


def describe_machine(machine: MachineSpeed) -> str:
    """Describe in one line the numerics that new runs on this machine get where the configuration says `auto`."""
    if machine.has_cuda:
        precision, why = _cuda_precision(machine)
        return f"{precision} with fused kernels: {why}"
    gain = f"its bf16 products are {machine.cpu_half_gain:.1f} times as fast as its fp32 ones"
    if machine.cpu_half_gain < MIN_BF16_GAIN:
        return f"fp32 with fused kernels: {gain}" if machine.cpu_half_gain else "fp32 with fused kernels"
    return f"bf16 with fused kernels, fp32 for networks under {MIN_BF16_WIDTH['fused']} wide: {gain}"


def _kernels(training: TrainingConfig, *, on_cuda: bool = False) -> Kernels:
    if training.kernels != "auto":
        return training.kernels
    # On a CPU the compiler gains nothing over the fused kernels, and would break them into parts.
    return "stock" if training.precision == "fp16" or (training.compile and not on_cuda) else "fused"


def _narrowest(training: TrainingConfig) -> int:
    """Return the smallest width at which bf16 is faster on a CPU; layers with adapters are not fused."""
    return MIN_BF16_WIDTH["stock" if training.lora else _kernels(training)]


def _cuda_precision(machine: MachineSpeed) -> tuple[Precision, str]:
    if machine.cuda_has_half:
        return "bf16", "the CUDA device multiplies bf16"
    return "fp32", "the CUDA device does not multiply bf16 by itself"
