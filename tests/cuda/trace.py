"""Traces training steps of fake tensors on "cuda" or on a CPU: their operations, tensors and memory, as JSON."""

import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.batch_loader import Batch
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.estimates.size_estimate import PARTS, TrainingPlace, estimate_memory
from cairn.model.inference.prediction import generate_stream, window_losses
from cairn.model.training.determinism import make_deterministic
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_step import StepInputs, UpdateGuard, launch_step
from cairn.tasks.trainer.staging_buffer import StagingBuffer

VOCABULARY, BOUNDARY, BLOCK_BYTES = 50257, 50256, 512
"""Of GPT-2, whose last token ends a document; what the device's allocator rounds up to."""


class Recorder(TorchDispatchMode):
    """Counts operations, the copies to the host among them, and the bytes of the device's live tensors."""

    def __init__(self) -> None:
        """Have seen nothing."""
        super().__init__()
        self.operations, self.to_host = Counter[str](), list[str]()
        self.bytes = self.peak_bytes = 0
        self.live = dict[int, tuple[str, int, weakref.ref[Any]]]()
        self.at_peak = Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        """Run one and look at what it makes."""
        made = operation(*given, **(named or {}))
        name = str(operation).removeprefix("aten.").removesuffix(".default")
        if not name.startswith("prim."):  # which device a tensor is on
            self.operations[name] += 1
        taken = [each for each in torch.utils._pytree.tree_leaves((given, named)) if isinstance(each, torch.Tensor)]
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                if tensor.device.type == "cpu" and any(each.device.type == "cuda" for each in taken):
                    self.to_host.append(name)
                self.keep(tensor, name)
        return made

    def keep(self, tensor: torch.Tensor, name: str) -> None:
        """Count a tensor's memory once, until it is free."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda" or storage._cdata in self.live:
            return
        size, key = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES, storage._cdata

        def free(_: Any) -> None:
            self.bytes -= size
            del self.live[key]

        label = f"{name} {list(tensor.shape)} {tensor.dtype}"
        self.live[key] = (label, size, weakref.ref(storage, free))
        self.bytes += size
        if self.bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self.bytes, Counter()
            for label, size, _ in self.live.values():
                self.at_peak[label] += size


class GatheredBatch:
    """Stands for the thread that reads batches ahead, and for who draws a token: numbers that the host knows."""

    def __init__(self, batch: Batch) -> None:
        """Have this one for every step."""
        self._batch = batch

    def batch(self, step: int) -> Batch:
        """Return it."""
        return self._batch

    def sample(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Draw a token from scores that have come to the host."""
        assert logits.device.type == "cpu" and logits.shape == (VOCABULARY,)
        return 5


def trace(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one step of a case does, or a held-out loss, a sample or a copy for a checkpoint."""
    model = ModelConfig(**{"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, **case.get("model", {})})
    own = {"precision": "bf16", "kernels": "fused", "global_batch": 8, "micro_batch": 8, **case.get("training", {})}
    training = TrainingConfig(steps=10, warmup_steps=0, **own)
    device = torch.device("cuda", 0) if case["device"] == "cuda" else torch.device("cpu")
    make_deterministic(seed=1, threads=1)
    inputs, seen = inputs_of(model, training), Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), seen:
        state = TrainState.create(model, training, VOCABULARY, device, filled=False)
        state.model.boundary_id = BOUNDARY if training.mask_documents else None
        gradients = dict[str, Any]()
        for name, parameter in state.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(look, gradients, name))
        seen.operations.clear()
        made = DOING[case.get("do", "step")](state, inputs)
        live = takewhile(lambda one: one[1] != "trainer", state._live())  # behind it is the scaler's number
        tensors = {name: of(tensor) for name, _, tensor in live}
    recompute = bool(training.activation_checkpointing)
    sizes = {"micro_batch": inputs.micro_batch, "recompute": recompute, "place": TrainingPlace(on_cuda=True)}
    estimate = estimate_memory(model, training, VOCABULARY, **sizes)
    return {
        "made": made, "operations": seen.operations, "to_host": seen.to_host, "tensors": tensors,
        "gradients": gradients, "peak_bytes": seen.peak_bytes, "at_peak": seen.at_peak.most_common(40),
        "estimate_bytes": estimate.total_bytes - estimate.runtime_bytes,
        "estimate": {part: estimate.bytes_of(part) for part in PARTS},
    }  # fmt: skip


def inputs_of(model: ModelConfig, training: TrainingConfig) -> StepInputs:
    """Return what a step reads, its batch gathered already."""
    windows = TokenWindows([np.zeros(model.block_size * 64 + 1, dtype=np.uint16)], model.block_size, VOCABULARY)
    order = SampleOrder(window_count=windows.window_count, seed=1, global_batch=training.global_batch)
    tokens = torch.zeros((training.global_batch, model.block_size + 1), dtype=torch.int64)
    batch: Any = GatheredBatch(Batch(windows=tuple(range(training.global_batch)), tokens=tokens))
    micro = int(training.micro_batch)
    return StepInputs(windows=windows, order=order, training=training, micro_batch=micro, loader=batch)


def one_step(state: TrainState, inputs: StepInputs) -> dict[str, Any]:
    """Launch a step; that of fp16, whose scaler skips bad ones by itself, has no guard."""
    guard = UpdateGuard(state.optimizers, state.device)
    with guard if state.scaler is None else nullcontext():
        launched = launch_step(state, inputs, guard)
    return {"metrics": of(launched.metrics), "weights_sum": of(launched.weights_sum)}


def held_out(state: TrainState, inputs: StepInputs) -> dict[str, Any]:
    """Measure 32 windows; the losses that come to the host have no number."""
    FakeTensor.tolist = lambda self: [0.0] * self.to("cpu").numel()  # type: ignore
    return {"windows": len(window_losses(state.model, inputs.windows, count=32))}


def sample(state: TrainState, inputs: StepInputs) -> dict[str, Any]:
    """Draw three tokens."""
    drawing: Any = inputs.loader
    return {"tokens": list(generate_stream(state.model, [1, 2, 3, 4], new_tokens=3, sampling=drawing))}


def copy(state: TrainState, inputs: StepInputs) -> dict[str, Any]:
    """Copy the state as for a checkpoint."""
    copies = StagingBuffer(state.device).copy(state.live_tensors())
    return {"copies": {named.name: of(named.tensor) for named in copies}}


DOING: Mapping[str, Callable[[TrainState, StepInputs], dict[str, Any]]] = {
    "step": one_step, "held out": held_out, "sample": sample, "copy": copy, "nothing": lambda *_: {},
}  # fmt: skip


def look(found: dict[str, Any], name: str, parameter: torch.Tensor) -> None:
    """Keep a gradient's device, shape and type."""
    found[name] = of(parameter.grad)


def of(tensor: torch.Tensor | None) -> list[Any] | None:
    """Return a tensor's device, shape and type."""
    return None if tensor is None else [tensor.device.type, list(tensor.shape), str(tensor.dtype)]


def main() -> None:
    """Trace the cases."""
    print(json.dumps([trace(json.loads(word)) for word in sys.argv[1:]]))


if __name__ == "__main__":
    main()
