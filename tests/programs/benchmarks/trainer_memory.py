"""How much memory a trainer really takes: its own parts, in a process of its own.

`python -m tests.programs.benchmarks.trainer_memory '{"layers": 4, …}'` trains as the trainer does, without the orders
of a parent: state, batches read ahead, steps, a checkpoint copied and staged while more steps follow; prints
`Measured`.
"""

import json
import os
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates.size_estimate import MemoryEstimate, TrainingPlace, estimate_memory
from tests.programs.benchmarks.own_process import answer_of, resident_bytes

STEPS_BEFORE, STEPS_BESIDE = 2, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCase:
    """A network, the arithmetic, and the windows of a micro-batch and of a step."""

    layers: int
    heads: int
    width: int
    block: int
    vocab_size: int
    micro_batch: int
    global_batch: int
    architecture: Any = "gpt2"
    key_heads: int | None = None
    precision: Any = "fp32"
    kernels: Any = "stock"
    recompute: bool = False
    dropout: float = 0.0
    masked: bool = False
    probed: bool = False
    device: str = "cpu"

    @property
    def model(self) -> ModelConfig:
        """The network's shape."""
        return ModelConfig(
            architecture=self.architecture,
            n_layer=self.layers,
            n_head=self.heads,
            n_kv_head=self.key_heads or self.heads,
            n_embd=self.width,
            block_size=self.block,
            dropout=self.dropout,
        )

    @property
    def training(self) -> TrainingConfig:
        """How it is trained."""
        return TrainingConfig(
            steps=STEPS_BEFORE + STEPS_BESIDE,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            precision=self.precision,
            kernels=self.kernels,
            activation_checkpointing=self.recompute,
            mask_documents=self.masked,
            probe_every_steps=1 if self.probed else 0,
            device=self.device,
        )

    @property
    def estimate(self) -> MemoryEstimate:
        """What the formulas say of it."""
        return estimate_memory(
            self.model,
            self.training,
            self.vocab_size,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            place=TrainingPlace(on_cuda=self.device.startswith("cuda")),
        )


def _cases(architecture: str) -> dict[str, MemoryCase]:
    sizes = {
        "small": (dict(layers=4, heads=4, width=128, block=128, vocab_size=1024), 32, (32, 8)),
        "middle": (dict(layers=6, heads=6, width=384, block=256, vocab_size=8192), 16, (16, 4)),
        "124M": (dict(layers=12, heads=12, width=768, block=256, vocab_size=50257), 2, (2, 1)),
    }
    modes = [(precision, kernels) for precision in ("fp32", "bf16") for kernels in ("stock", "fused")]
    cases = {
        f"{name} {precision} {kernels} {windows}": MemoryCase(
            **shape,
            micro_batch=windows,
            global_batch=batch,
            architecture=architecture,
            precision=precision,
            kernels=kernels,
        )
        for name, (shape, batch, micro_batches) in sizes.items()
        for precision, kernels in modes
        for windows in micro_batches
    }
    recomputed = {f"{name} recomputed": replace(cases[name], recompute=True) for name in cases if name.endswith(" 16")}
    middle = replace(cases["middle fp32 stock 4"], global_batch=4)
    wide = MemoryCase(layers=2, heads=8, width=1024, block=128, vocab_size=512, micro_batch=1, global_batch=1)
    others = {
        "middle bf16 stock 4 masked": replace(middle, precision="bf16", masked=True),
        "middle bf16 fused 4 masked": replace(middle, precision="bf16", kernels="fused", masked=True),
        "middle fp32 stock 4 dropout": replace(middle, dropout=0.1),
        "middle bf16 stock 4 dropout": replace(middle, precision="bf16", dropout=0.1),
        "wide fp32 stock 1 probed": replace(wide, architecture=architecture, probed=True),
    }
    if architecture == "qwen3":
        others["middle fp32 stock 4 grouped"] = replace(middle, key_heads=2)
        others["middle bf16 fused 4 grouped"] = replace(middle, precision="bf16", kernels="fused", key_heads=2)
    return {**cases, **recomputed, **others}


CASES = {**_cases("gpt2"), **{f"qwen3 {name}": case for name, case in _cases("qwen3").items()}}
"""Three sizes of network in every mode, two micro-batches each; one also recomputed, masked, with dropout; a probe.

GPT-2's layers first, then the same of Qwen3's, which also share keys.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Bytes resident at most; on CUDA bytes of the device beside it."""

    peak_bytes: int
    device_peak_bytes: int = 0


def measure(case: MemoryCase, *, threads: int = 2) -> Measured:
    """Train in a process of its own and return what it took."""
    module = "tests.programs.benchmarks.trainer_memory"
    return Measured(**answer_of(module, json.dumps(asdict(case)), OMP_NUM_THREADS=str(threads)))


def train(case: MemoryCase, folder: Path) -> Measured:
    """Do in this process what the trainer does, and return what it took."""

    from cairn.model.data.batch_loader import BatchLoader
    from cairn.model.data.sample_order import SampleOrder
    from cairn.model.data.token_windows import TokenWindows
    from cairn.model.training.determinism import make_deterministic, resolve_device
    from cairn.model.training.train_state import TrainState
    from cairn.model.training.training_loop import StepObserver, train_until
    from cairn.model.training.training_step import StepInputs
    from cairn.storage.stores.open_store import open_store
    from cairn.tasks.trainer.staging import Staging
    from cairn.tasks.trainer.staging_buffer import StagingBuffer

    threads, device = int(os.environ.get("OMP_NUM_THREADS", "2")), resolve_device(case.device)
    make_deterministic(seed=1, threads=threads)
    import cairn.tasks.trainer.trainer  # noqa: F401 - all that the trainer imports

    tokens = np.arange(case.global_batch * case.block * 8 + 1, dtype=np.int64) * 7919 % case.vocab_size
    windows = TokenWindows([tokens.astype(np.uint16)], case.block, case.vocab_size)
    order = SampleOrder(window_count=windows.window_count, seed=1, global_batch=case.global_batch)
    state = TrainState.create(case.model, case.training, case.vocab_size, device)
    state.model.boundary_id = 7 if case.masked else None
    failures: list[Exception] = []
    store, buffer = open_store(folder.as_uri()), StagingBuffer(device)
    staging = Staging(store, lambda _: None, failures.append, patience_seconds=1.0, buffer=buffer)
    with closing(BatchLoader(windows, order, device, end_step=case.training.steps)) as loader:
        inputs = StepInputs(
            windows=windows, order=order, training=case.training, micro_batch=case.micro_batch, loader=loader
        )
        observer = StepObserver(on_step=lambda _: None, stop_requested=lambda: False, probe=_probe(case))

        def go(until: int) -> None:
            train_until(state, inputs, observer, until_step=until)

        staging.prepare(state.live_tensors())
        go(STEPS_BEFORE)
        staging.begin(_checkpoint(staging.copy(state.live_tensors()), state.cursor), before=lambda: None)
        go(STEPS_BEFORE + STEPS_BESIDE)
        staging.wait()
    if failures:
        raise failures[0]
    device_peak = device_peak_bytes(device) if device.type == "cuda" else 0
    return Measured(peak_bytes=resident_bytes("VmHWM"), device_peak_bytes=device_peak)


def device_peak_bytes(device: Any) -> int:
    """Return what this process has taken of a CUDA device at most, if it is alone there: its allocator and the rest."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    return int(torch.cuda.max_memory_allocated(device) + context)


def _probe(case: MemoryCase) -> Any:
    from cairn.model.data.token_windows import TokenWindows
    from cairn.model.training.training_loop import Probe

    if not case.probed:
        return None
    tokens = np.arange(case.block * 64 + 1, dtype=np.int64) * 7919 % case.vocab_size
    windows = TokenWindows([tokens.astype(np.uint16)], case.block, case.vocab_size)
    rhythm = case.training.model_copy(update={"probe_every_steps": 1, "probe_batches": 8, "sample_tokens": 4})
    return Probe(windows=windows, training=rhythm, prompt_ids=[1], decode=str)


def _checkpoint(tensors: Any, cursor: int) -> Any:
    from cairn.storage.checkpoints.checkpoint import checkpoint_target
    from cairn.storage.checkpoints.payload import TrainerDocument, small_tensor
    from cairn.tasks.trainer.staging import HostCheckpoint
    from cairn.tasks.trainer.tensor_exchange import to_group

    document = TrainerDocument(
        version=1,
        step=STEPS_BEFORE,
        cursor=cursor,
        learning_rate=1e-3,
        versions={},
        tensors=tuple(small_tensor(record) for record in to_group("trainer", tensors).records),
    )
    target = checkpoint_target("r", step=STEPS_BEFORE, attempt=1)
    return HostCheckpoint(target=target, tensors=tensors, document=document)


def main() -> None:
    """Be the process that is measured."""
    with tempfile.TemporaryDirectory(prefix="trainer-memory-") as folder:
        measured = train(MemoryCase(**json.loads(sys.argv[1])), Path(folder))
    print(json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    main()
