"""The train state: everything that training needs to continue bit for bit, as named tensors."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, Self

import torch
from torch import Tensor

from cairn.model.architectures import adapters, gpt
from cairn.model.architectures.own_network import Network, OwnNetwork, check_network, make_network
from cairn.model.configuration.data import NOTHING_BEFORE, TrainedBefore
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import Precision, TrainingConfig
from cairn.model.errors import InvalidInput, StateMismatch
from cairn.model.kernels.head_loss import COMPILE_OPTIONS
from cairn.model.training import determinism, gradient_sum, optimizer, parallel, sharded_tensors

Group = Literal["weights", "optimizer", "trainer"]

AUTOCAST_DTYPES: Mapping[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_PREFIX = "model."
"""Prefix of every parameter's name in the "weights" group of a train state."""


class OwnTime:
    """How long a rank works on a step by itself: longest on the slow one, for which the others wait.

    The newest step that is known: on a GPU, for which the host does not wait, an earlier one.
    """

    def __init__(self, device: torch.device) -> None:
        """Know nothing yet."""
        self._is_cuda = device.type == "cuda"
        self._launched = deque[tuple[float, torch.cuda.Event, torch.cuda.Event]]()
        self._reading = 0.0
        self.seconds = 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the block as the wait for the step's batch."""
        began = time.perf_counter()
        yield
        self._reading = time.perf_counter() - began

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block as the step's computation."""
        if not self._is_cuda:
            began = time.perf_counter()
            yield
            self.seconds = self._reading + time.perf_counter() - began
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._launched.append((self._reading, first, last))
        while self._launched and self._launched[0][2].query():
            reading, first, last = self._launched.popleft()
            self.seconds = reading + first.elapsed_time(last) / 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTensor:
    """One tensor of a train state."""

    name: str
    group: Group
    tensor: Tensor


@dataclass(kw_only=True, slots=True, eq=False)
class TrainState:
    """Model (`network`: it or its compiled form), optimizers, grad scaler (fp16) and completed steps; see `create`."""

    model: Network
    optimizers: tuple[torch.optim.Optimizer, ...]
    scaler: torch.amp.GradScaler | None
    global_batch: int
    network: Callable[..., Tensor]
    ranks: parallel.Ranks
    own_time: OwnTime
    workers: gradient_sum.Workers = field(default_factory=gradient_sum.Workers, init=False)
    step: int = field(default=0, init=False)
    before: TrainedBefore = field(default=NOTHING_BEFORE, init=False)
    beside: Mapping[str, Tensor] = field(default_factory=dict, init=False)
    """Tensors that name the weights beside adapters, see `adapters.name_base`; a state that is loaded has the same."""

    @classmethod
    def create(
        cls,
        model_config: ModelConfig,
        training_config: TrainingConfig,
        vocab_size: int,
        device: torch.device,
        ranks: parallel.Ranks = parallel.SINGLE_RANK,
        *,
        filled: bool = True,
        files: Mapping[str, bytes] | None = None,
    ) -> Self:
        """Make the state of step 0, a pure function of configs and vocabulary, with equal weights on every device.

        Unless it is `filled`, its weights have yet to be loaded. Memory is needed for this process's part and one
        tensor. A collective call of `ranks`; the process's generators stay unchanged. `auto` numerics raise
        InvalidInput. `files` are those of a module, which is made whole.
        """
        if "auto" in (training_config.precision, training_config.kernels):
            raise InvalidInput("precision and kernels must be chosen before a state is made: see choose_numerics")
        model: Network
        if model_config.module:
            make = partial(make_network, files or {}, model_config, vocab_size)
            model = _make_own(make, training_config, device, new=filled)
        else:
            model = _make_gpt(model_config, training_config, vocab_size, device, ranks)
        if filled and isinstance(model, gpt.GPT):
            with determinism.keeping_generators(device):
                determinism.seed_generators(training_config.seed, device)
                model.fill(sharded_tensors.copy_into)
                adapters.fill(model, sharded_tensors.copy_into)
        compiles_whole = training_config.compile and training_config.kernels == "stock"
        return cls(
            model=model,
            optimizers=optimizer.make_optimizers(model, training_config),
            scaler=torch.amp.GradScaler(device.type) if training_config.precision == "fp16" else None,
            global_batch=training_config.global_batch,
            network=torch.compile(model, options=COMPILE_OPTIONS) if compiles_whole else model,
            ranks=ranks,
            own_time=OwnTime(device),
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    @property
    def cursor(self) -> int:
        """Samples drawn so far, by the runs before it too."""
        return self._cursor_at(self.step)

    def live_tensors(self) -> tuple[NamedTensor, ...]:
        """Return the state's own tensors, sorted by name; training continues to change them."""
        tensors = (NamedTensor(name=name, group=group, tensor=tensor.detach()) for name, group, tensor in self._live())
        return tuple(sorted(tensors, key=lambda tensor: tensor.name))

    @torch.no_grad()
    def weights_sum(self) -> Tensor | None:
        """Return an int64 sum over all weights' bits, on the device, None if sharded; any changed word shows."""
        return None if self.ranks.is_sharded else _sum_bits(list(self.model.parameters()), self.device)

    @torch.no_grad()
    def bits_sum(self) -> Tensor:
        """Return the sum (1,) over all tensors of the state, which replicated ranks have in common."""
        return _sum_bits([named.tensor for named in self.live_tensors()], self.device).reshape(1)

    def named_tensors(self) -> tuple[NamedTensor, ...]:
        """Copy the full state to contiguous host memory, sorted by name."""
        live = self.live_tensors()
        full = ((one, sharded_tensors.gather_full(one.tensor)) for one in live)
        return tuple(replace(one, tensor=tensor.to("cpu", copy=True).contiguous()) for one, tensor in full)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of `tensors` in place; different names, shapes or dtypes raise StateMismatch, unchanged."""
        self.check_fits(tensors)
        for name, group, tensor in self._live():
            if group != "trainer":
                sharded_tensors.copy_into(tensor, tensors[name])
        self.load_trainer(tensors)

    def check_fits(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise StateMismatch unless these fit by name, shape and dtype; only step and cursor need values."""
        live = {name: tensor for name, _, tensor in self._live()}
        if difference := describe_mismatch(live, tensors):
            raise StateMismatch(f"checkpoint does not fit this run ({difference}); continue with its own frozen config")
        step, cursor = int(tensors["step"]), int(tensors["cursor"])
        if step < self.before.step or cursor != (must := self._cursor_at(step)):
            after = f" after {self.before.draws} until step {self.before.step}" if self.before.step else ""
            problem = f"cursor={cursor} must be {must}: step={step} with global_batch={self.global_batch}{after}"
            raise StateMismatch(problem)
        for name, value in self.beside.items():
            if not torch.equal(tensors[name], value):
                found = f"{name} is {tensors[name].tolist()}, must be {value.tolist()}"
                raise StateMismatch(f"the adapters were trained beside other weights: {found}; restore the run's log")

    def load_trainer(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the group "trainer" of a state that fits, after weights and moments are in place."""
        self.step = int(tensors["step"])
        self.model.zero_grad(set_to_none=True)
        if self.scaler is not None:
            state: dict[str, Any] = self.scaler.state_dict()
            state["scale"] = float(tensors["scaler.scale"])
            state["_growth_tracker"] = int(tensors["scaler.growth_tracker"])
            self.scaler.load_state_dict(state)

    def _cursor_at(self, step: int) -> int:
        return self.before.draws + (step - self.before.step) * self.global_batch

    def _live(self) -> Iterator[tuple[str, Group, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue  # beside adapters; the state names them by their digest
            yield f"{WEIGHT_PREFIX}{name}", "weights", parameter
            for moment, tensor in sorted(optimizer.moments_of(self.optimizers, parameter).items()):
                yield f"optimizer.{name}.{moment}", "optimizer", tensor
        yield "step", "trainer", torch.tensor(self.step, dtype=torch.int64)
        yield "cursor", "trainer", torch.tensor(self.cursor, dtype=torch.int64)
        for name, value in self.beside.items():
            yield name, "trainer", value
        if self.scaler is not None:
            scaler: dict[str, Any] = self.scaler.state_dict()
            yield "scaler.scale", "trainer", torch.tensor(scaler["scale"], dtype=torch.float32)
            yield "scaler.growth_tracker", "trainer", torch.tensor(scaler["_growth_tracker"], dtype=torch.int64)


def _sum_bits(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    flat = (tensor.detach().reshape(-1) for tensor in tensors)  # its shape -> (n,)
    words = (each.view(torch.int32 if each.nbytes % 8 else torch.int64) for each in flat)
    sums = torch.stack([each.sum() for each in words])  # (tensors,)
    mixed = sums ^ ((sums >> 32) & 0xFFFFFFFF)  # a change of high bits changes low ones too
    return (mixed * _factors(len(sums), device)).sum()


@cache
def _factors(count: int, device: torch.device) -> Tensor:
    """Return odd factors, so that changes of two tensors do not cancel out."""
    powers = (pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(1, count + 1))
    return torch.tensor([value - 2**64 if value >= 2**63 else value for value in powers], device=device)


def _make_gpt(
    config: ModelConfig, training: TrainingConfig, vocab_size: int, device: torch.device, ranks: parallel.Ranks
) -> gpt.GPT:
    """Make the network without values."""
    with torch.device("meta"):
        model = gpt.GPT(config, vocab_size, training.activation_checkpointing)
    if training.lora is not None:
        adapters.adapt(model, training.lora)
    # The fused layer passes by adapters: it computes with the layers' own weights.
    model.fuse_blocks(training.kernels == "fused" and not (training.compile or training.lora))
    if training.compile and training.kernels == "fused":
        compile_layers(model)
    ranks.wrap(model, device, AUTOCAST_DTYPES.get(training.precision))
    if ranks.is_sharded:
        model.to_empty(device=device)
    else:  # the same, but asking a tensor on "meta" for one like it would import half of torch's compiler
        model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        )
    return model


def _make_own(make: Callable[[], OwnNetwork], training: TrainingConfig, device: torch.device, new: bool) -> OwnNetwork:
    """Make a module with its first values, and where a run begins find out whether it can be trained at all."""
    with determinism.keeping_generators(device):
        determinism.seed_generators(training.seed, device)
        model = make().to(device)
        if new:
            determinism.seed_generators(training.seed, device)
            check_network(model, make)
    if training.activation_checkpointing:
        model.recompute_blocks()
    return model


def compile_layers(model: gpt.GPT) -> None:
    """Compile each layer alone, once for all; embedding and head not: a compiler may reorder their backward sums."""
    model.compiled_layers = [torch.compile(block, dynamic=False, options=COMPILE_OPTIONS) for block in model.h]


def describe_mismatch(expected: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> str | None:
    """Describe the differences in names, shapes and dtypes between two sets of tensors; None if they are equal."""
    missing = sorted(expected.keys() - offered.keys())
    unexpected = sorted(offered.keys() - expected.keys())
    wrong = [
        f"{name} is {tuple(offered[name].shape)} {offered[name].dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in sorted(expected.items())
        if name in offered and (offered[name].shape != tensor.shape or offered[name].dtype != tensor.dtype)
    ]
    parts = [
        f"{word}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for word, names in (("missing", missing), ("unexpected", unexpected), ("different", wrong))
        if names
    ]
    return "; ".join(parts) or None


@torch.no_grad()
def load_weights(model: Network, tensors: Mapping[str, Tensor]) -> None:
    """Copy the `model.*` tensors in place; other names, shapes or dtypes raise StateMismatch, nothing is copied.

    Of a network with adapters, they are those beside them, which are frozen.
    """
    every = {f"{WEIGHT_PREFIX}{name}": parameter for name, parameter in model.named_parameters()}
    expected = {name: parameter for name, parameter in every.items() if not parameter.requires_grad} or every
    offered = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT_PREFIX)}
    if difference := describe_mismatch(expected, offered):
        raise StateMismatch(f"weights do not fit the model ({difference}); use the config the checkpoint was made with")
    for name, parameter in expected.items():
        sharded_tensors.copy_into(parameter, offered[name])
