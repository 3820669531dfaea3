"""The section `[training]`: batch sizes in windows, lengths in optimizer steps, rates per step; its micro-batches, and
the low-rank adapters that it puts beside a network's matrices (Hu et al. 2021, "LoRA"). Imports no torch.

The micro-batch is the unit in which gradients are added up, along one binary tree over micro-batch indices
(`parallel`). A replicated process computes a whole subtree, so the same sum comes out of any number of processes:
each has the same number of micro-batches, and that is a power of two. Sharded processes each have an equal number of
smaller parts instead, because all of them must run every forward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cairn.model.configuration import network
from cairn.model.configuration.network import NotNegative, NotNegativeNumber, Positive, PositiveNumber, Section
from cairn.model.errors import InvalidInput

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Kernels = Literal["auto", "stock", "fused"]
Parallel = Literal["ddp", "fsdp"]
Arithmetic = Literal["native", "portable"]
OptimizerName = Literal["adamw", "adam", "momentum", "sgd", "muon"]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
UNFROZEN_TRAINING = frozenset(
    {"device", "activation_checkpointing", "on_oom", "probe_every_steps", "probe_batches", "sample_tokens"}
    | {"processes", "parallel", "memory_check", "workers"}
)
"""Training keys that do not change which run it is; all others are frozen when the run is opened."""


_MOST_PARTS, _FEWEST_IN_HALF, _FEWEST_TOKENS, _MOST_TOKENS = 8, 256, 1024, 16_384
"""With fewer tokens a micro-batch costs more than sharing it gains; with more it takes memory and gains nothing."""


class LoraConfig(Section, use_attribute_docstrings=True):
    """Low-rank adapters, trained beside frozen weights of training.init_from. Without the section all weights are."""

    rank: Positive = 8
    """rank of each adapter: numbers between its two matrices"""
    alpha: PositiveNumber = network.computed(lambda data: 2.0 * data.get("rank", 1), "2 rank")
    """what an adapter adds is multiplied by alpha / rank"""
    targets: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")], ...], Field(min_length=1)] | None = (
        Field(None, json_schema_extra={"rule": "a list of names", "default_rule": "all of attention and feed-forward"})
    )
    """linear layers that get an adapter, by the ends of their names in transformers, such as q_proj, or here"""


class TrainingConfig(Section, use_attribute_docstrings=True):
    """How the network is trained."""

    steps: Positive = Field(json_schema_extra={"unit": "steps"})
    """number of optimizer steps of the run"""
    global_batch: Positive = Field(32, json_schema_extra={"unit": "windows"})
    """batch size of one optimizer step, all processes together"""
    micro_batch: Positive | Literal["auto"] = Field("auto", json_schema_extra={"unit": "windows"})
    """windows of one forward and backward pass, the unit of the sum of gradients; auto cuts the batch by its tokens
    alone, on a CPU into up to eight"""
    optimizer: OptimizerName = "adamw"
    """how gradients move weights; muon takes the layers' matrices and leaves the rest to adamw"""
    lr: PositiveNumber = 1e-3
    """learning rate after the warm-up"""
    min_lr: NotNegativeNumber = 1e-4
    """learning rate at the last step; with 0 that step changes no weight"""
    muon_lr: PositiveNumber = 0.02
    """learning rate of muon's matrices after the warm-up; it rises and falls as lr does"""
    warmup_steps: NotNegative = network.computed(
        lambda data: min(2000, int(data.get("steps", 0)) // 10), "a tenth of steps, at most 2000"
    )
    """steps in which the learning rate rises from 0 to lr"""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """how the learning rate falls: cosine from the warm-up on; wsd stays at lr and falls linearly at the end, so that a
    fork from before that can go on"""
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """share of the steps in which a wsd schedule falls"""
    weight_decay: NotNegativeNumber = 0.1
    """weight decay of matrices and tables; apart from the gradient with adamw and muon, else in it"""
    betas: tuple[Beta, Beta] = network.ruled((0.9, 0.95), "a list of two numbers of at least 0 and below 1")
    """decay rates of adam's and adamw's first and second moment of the gradient"""
    momentum: Beta = network.computed(
        lambda data: 0.95 if data.get("optimizer") == "muon" else 0.9, "momentum: 0.9, muon: 0.95"
    )
    """decay rate of the gradients' sum that momentum and muon keep"""
    z_loss: NotNegativeNumber = 0.0
    """weight of the squared logarithm of the head's sum, which keeps scores small; the recorded loss is without it"""
    grad_clip: NotNegativeNumber = 1.0
    """greatest norm of a gradient; 0 clips nothing"""
    precision: Precision = "auto"
    """number format of the arithmetic; auto takes the fastest with reproducible bits"""
    arithmetic: Arithmetic = "native"
    """instructions that a CPU computes with: native takes its widest, and a run that moves to another kind of processor
    may get other bits; portable those of AVX2 everywhere, slower, in fp32 unless precision is named"""
    compile: bool = False
    """use torch.compile"""
    kernels: Kernels = "auto"
    """implementation of layers and loss; auto takes the fastest with reproducible bits"""
    mask_documents: bool = False
    """attention stays within a document"""
    init_from: Annotated[str, Field(min_length=1)] | None = None
    """folder or URL of a Hugging Face model (GPT-2, Llama, Qwen3) whose weights the run begins with, not random ones;
    it decides data.tokenizer and the keys of model that are not set"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    """seed of initial weights, dropout and the order of windows"""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = network.ruled(
        "auto", "auto, cpu, cuda, cuda:<number> or mps"
    )
    """device that trains; auto takes a CUDA device where there is one; mps is Apple's GPU"""
    activation_checkpointing: bool = False
    """compute activations again in the backward pass: less memory, more time, equal bits"""
    on_oom: Literal["recompute", "halve"] = "recompute"
    """what is tried first after out-of-memory: recompute activations, which keeps the bits, or halve the micro-batch,
    which is faster and changes them"""
    probe_every_steps: NotNegative = 100
    """steps between losses of the training network on held-out text, for the curve; 0 never"""
    probe_batches: Positive = 4
    """held-out batches of one probe, of 8 windows each"""
    sample_tokens: NotNegative = 120
    """length of the text sample drawn with each probe"""
    threads: Positive = 1
    """CPU threads of each product and sum, which are part of the arithmetic: another number gives other bits"""
    workers: Positive | Literal["auto"] = "auto"
    """micro-batches that each process computes at once on a CPU, over the same weights; auto takes as many as there are
    cores, memory and micro-batches for, with dropout one; no bit depends on it"""
    processes: Positive | Literal["auto"] = 1
    """processes that train together on each machine; auto takes one for each visible GPU"""
    parallel: Parallel = "ddp"
    """how several processes share the network: ddp replicates it, fsdp splits it"""
    memory_check: bool = True
    """refuse a micro_batch whose estimated memory exceeds the free memory"""
    lora: LoraConfig | None = None
    """adapters of low rank that are trained instead of the weights, which stay as training.init_from gave them"""

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        if self.micro_batch != "auto" and self.micro_batch > self.global_batch:
            raise ValueError(f"micro_batch={self.micro_batch} must be at most global_batch={self.global_batch}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be at most steps={self.steps}")
        if self.schedule == "wsd" and self.warmup_steps + self.decay_steps > self.steps:
            both = f"warmup_steps={self.warmup_steps} and decay_fraction={self.decay_fraction}"
            raise ValueError(f"{both}, {self.decay_steps} steps, must together be at most steps={self.steps}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} must be at most lr={self.lr}")
        if self.steps == 1 and self.wastes_last_step:
            raise ValueError("min_lr=0 leaves steps=1 no learning rate: the only step is the last; set min_lr to lr")
        if self.arithmetic == "portable" and self.device.startswith(("cuda", "mps")):
            raise ValueError(f"arithmetic='portable' cannot be combined with device={self.device!r}: it is for CPUs")
        # The head's gradient is made before the scaler's factor is known.
        if self.kernels == "fused" and self.precision == "fp16":
            raise ValueError("kernels='fused' cannot be combined with precision='fp16': use kernels='stock', or bf16")
        if self.optimizer == "muon" and (self.precision == "fp16" or self.parallel == "fsdp"):
            other = "precision='fp16'" if self.precision == "fp16" else "parallel='fsdp'"
            raise ValueError(f"optimizer='muon' cannot be combined with {other}: use bf16 or fp32, and ddp")
        if self.lora is not None and (self.optimizer == "muon" or self.parallel == "fsdp" or self.compile):
            other = "optimizer='muon'" if self.optimizer == "muon" else "parallel='fsdp'"
            other = "compile=true" if self.compile else other
            raise ValueError(f"lora cannot be combined with {other}: use adamw, ddp, and compile=false")
        return self

    @property
    def wastes_last_step(self) -> bool:
        """Whether the last step has a learning rate of 0, so that no weight changes in it."""
        return self.min_lr == 0 and self.warmup_steps < self.steps

    @property
    def decay_steps(self) -> int:
        """The steps in which a wsd schedule falls; at least one."""
        return max(1, round(self.steps * self.decay_fraction))


@cache
def split_batch(
    global_batch: int, micro_batch: int, *, processes: int = 1, mode: Parallel = "ddp"
) -> tuple[tuple[slice, ...], ...]:
    """Return, by process, the rows of each of its micro-batches; raises InvalidInput naming the numbers that can."""
    if mode == "fsdp" and processes > 1:  # shares differ by one row at most; each has the parts that the largest needs
        count = ceil(ceil(global_batch / processes) / micro_batch)
        shares = [_cut(slice(0, global_batch), rank, processes) for rank in range(processes)]
        return tuple(tuple(_cut(share, part, count) for part in range(count)) for share in shares)
    count = ceil(global_batch / micro_batch)
    if processes not in possible_processes(global_batch, micro_batch):
        possible = ", ".join(map(str, possible_processes(global_batch, micro_batch)))
        shared = f"{count} micro-batch{'es' if count > 1 else ''} ({global_batch=}, {micro_batch=})"
        problem = f"{processes} processes cannot share {shared} so that the sum of gradients stays the same"
        advice = "Use as many, or open a run with another micro_batch, or parallel = 'fsdp'"
        raise InvalidInput(f"{problem}; processes that can: {possible}. {advice}")
    each = count // processes
    parts = [slice(i * micro_batch, min((i + 1) * micro_batch, global_batch)) for i in range(count)]
    return tuple(tuple(parts[rank * each : (rank + 1) * each]) for rank in range(processes))


def possible_processes(global_batch: int, micro_batch: int) -> tuple[int, ...]:
    """Return the numbers of replicated processes that give the same bits as one, smallest first."""
    count = ceil(global_batch / micro_batch)
    halved = [count >> level for level in range(count.bit_length()) if count % (1 << level) == 0]
    return tuple(sorted({1, *halved}))


def auto_micro_batch(global_batch: int, block_size: int, *, on_cpu: bool) -> int:
    """Return the windows of a micro-batch where the configuration says `auto`: never by cores, load or memory.

    A CPU's workers share up to eight; elsewhere one is the fastest, as long as it is not large.
    """
    tokens = global_batch * block_size
    parts = 2 if on_cpu and tokens >= 2 * _FEWEST_IN_HALF else 1
    while (on_cpu and parts < _MOST_PARTS and tokens >= 2 * parts * _FEWEST_TOKENS) or tokens > parts * _MOST_TOKENS:
        parts *= 2
    return ceil(global_batch / parts)


def first_micro_batch(global_batch: int, *, processes: int = 1, mode: Parallel = "ddp") -> int | None:
    """Return the largest micro-batch of which every process has at least one, or None if they cannot share any."""
    return _largest(global_batch, ceil(global_batch / processes), processes, mode)


def smaller_micro_batch(batch: int, micro_batch: int, *, processes: int = 1, mode: Parallel = "ddp") -> int | None:
    """Return the largest micro-batch up to half of this one that the processes can share, or None."""
    return _largest(batch, micro_batch // 2, processes, mode)


def _largest(global_batch: int, at_most: int, processes: int, mode: Parallel) -> int | None:
    sizes = range(at_most, 0, -1)
    if mode == "ddp" and processes > 1:
        return next((size for size in sizes if processes in possible_processes(global_batch, size)), None)
    return next(iter(sizes), None)


def _cut(rows: slice, place: int, places: int) -> slice:
    count = rows.stop - rows.start
    return slice(rows.start + count * place // places, rows.start + count * (place + 1) // places)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRow:
    """An adapter of `rows` of the linear layer `layer`; in `transformers` they are `theirs`, of as many `columns`."""

    layer: str
    rows: slice
    columns: int
    theirs: str

    @property
    def name(self) -> str:
        """Its name in the network; it has the matrices `A` and `B`."""
        return f"{self.layer}.lora.{self.leaf}"

    @property
    def leaf(self) -> str:
        """The last part of their name."""
        return self.theirs.rpartition(".")[2]

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B."""
        return (rank, self.columns), (self.rows.stop - self.rows.start, rank)


def adapter_table(model: network.ModelConfig, targets: tuple[str, ...] | None = None) -> tuple[AdapterRow, ...]:
    """Return the adapters of these targets, None for all, in the network's order; InvalidInput names one without any.

    A target is the end of a layer's name, as in peft.
    """
    rows = tuple(_rows(model))
    if targets is None:
        return rows
    for target in targets:
        if not any(_is_meant(row, target) for row in rows):
            known = ", ".join(dict.fromkeys(row.leaf for row in rows))
            raise InvalidInput(f"training.lora.targets: {target!r} is no linear layer of the network; it has {known}")
    return tuple(row for row in rows if any(_is_meant(row, target) for target in targets))


def count_trained(model: network.ModelConfig, lora: LoraConfig) -> tuple[int, ...]:
    """Return how many numbers each tensor has that is trained, in the network's order."""
    rows = adapter_table(model, lora.targets)
    return tuple(prod(shape) for row in rows for shape in row.shapes(lora.rank))


def _is_meant(row: AdapterRow, target: str) -> bool:
    return any(f".{name}".endswith(f".{target}") for name in (row.theirs, row.layer))


def _rows(model: network.ModelConfig) -> Iterator[AdapterRow]:
    for parameter in network.parameter_table(model, 1):
        if parameter.kind != "matrix":
            continue
        layer, begin = parameter.name.removesuffix(".weight"), 0
        counts = parameter.rows if len(parameter.theirs) > 1 else (sum(parameter.rows),)
        for theirs, count in zip(parameter.theirs or (parameter.name,), counts, strict=True):
            rows, named = slice(begin, begin + count), theirs.removesuffix(".weight")
            yield AdapterRow(layer=layer, rows=rows, columns=parameter.shape[1], theirs=named)
            begin += count
