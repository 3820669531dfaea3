"""Traces training steps of fake tensors on "cuda" or on a CPU: their operations, tensors and memory, as JSON."""

import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.batch_loader import Batch
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.estimates.size_estimate import PARTS, TrainingPlace, estimate_memory, step_exchanges
from cairn.model.inference.prediction import generate_stream, window_losses
from cairn.model.training.determinism import make_deterministic
from cairn.model.training.parallel import Ranks
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_step import StepInputs, UpdateGuard, launch_step
from cairn.tasks.trainer.staging_buffer import StagingBuffer
from tests.model.rank_legs import Exchanges
from tests.networks.own_files import nanogpt

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
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the tensors that it is made of
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
            self.bytes -= self.live.pop(key)[1]

        label = f"{name} {list(tensor.shape)} {tensor.dtype}"
        self.live[key] = (label, size, weakref.ref(storage, free))
        self.bytes += size
        self.look()

    def look(self) -> None:
        """Remember what there is at the peak."""
        if self.bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self.bytes, Counter()
            for label, size, _ in self.live.values():
                self.at_peak[label] += size

    def resize(self, tensor: torch.Tensor) -> None:
        """Count a tensor whose memory sharding took or gave back, the tensor itself staying."""
        label, before, storage = self.live.get(tensor.untyped_storage()._cdata, ("", 0, None))
        if storage is not None:
            size = -(-tensor.untyped_storage().nbytes() // BLOCK_BYTES) * BLOCK_BYTES
            self.bytes += size - before
            self.live[tensor.untyped_storage()._cdata] = (label, size, storage)
            self.look()


class GatheredBatch:
    """Stands for the thread that reads batches ahead, and for who draws a token: numbers that the host knows."""

    def __init__(self, batch: Batch) -> None:
        """Have this one for every step."""
        self._batch = batch

    def batch(self, step: int, rows: slice) -> Batch:
        """Return it."""
        return self._batch

    def sample(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Draw a token from scores that have come to the host."""
        assert logits.device.type == "cpu" and logits.shape == (VOCABULARY,)
        return 5


def trace(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one step of a case does, or a held-out loss, a sample or a copy for a checkpoint."""
    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, **case.get("model", {})}
    model = ModelConfig.model_validate(sizes)
    own = {"precision": "bf16", "kernels": "fused", "global_batch": 8, "micro_batch": 8, **case.get("training", {})}
    training = TrainingConfig(steps=10, warmup_steps=0, **own)
    device = torch.device("cuda", 0) if case["device"] == "cuda" else torch.device("cpu")
    make_deterministic(seed=1, threads=1)
    inputs, seen, size = inputs_of(model, training), Recorder(), case.get("processes", 1)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ranks_of(size, training, seen) as ranks, fake, seen, Exchanges() as exchanges:
        files = nanogpt() if model.module else None
        state = TrainState.create(model, training, VOCABULARY, device, ranks, filled=False, files=files)
        state.model.boundary_id = BOUNDARY if training.mask_documents else None
        gradients = dict[str, Any]()
        for name, parameter in state.model.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.register_post_accumulate_grad_hook(partial(look, gradients, name))
        seen.operations.clear()
        exchanges.operations.clear()
        made = DOING[case.get("do", "step")](state, inputs)
        live = takewhile(lambda one: one[1] != "trainer", state._live())  # behind it is the scaler's number
        tensors = {name: of(tensor) for name, _, tensor in live}
    recompute = bool(training.activation_checkpointing)
    sizes = {
        "micro_batch": inputs.micro_batch,
        "recompute": recompute,
        "place": TrainingPlace(on_cuda=True, processes=size),
    }
    known = ModelConfig() if model.module else model  # a module has no formula
    estimate = estimate_memory(known, training, VOCABULARY, **sizes)
    planned = step_exchanges(known, training, VOCABULARY, micro_batch=inputs.micro_batch, processes=size)
    return {
        "made": made, "operations": seen.operations, "to_host": seen.to_host, "tensors": tensors,
        "gradients": gradients, "exchanged": exchanges.operations,
        "planned": {one.operation: [one.calls, one.bytes] for one in planned},
        "peak_bytes": seen.peak_bytes, "at_peak": seen.at_peak.most_common(40),
        "estimate_bytes": estimate.total_bytes - estimate.runtime_bytes,
        "estimate": {part: estimate.bytes_of(part) for part in PARTS},
    }  # fmt: skip


@contextmanager
def ranks_of(size: int, training: TrainingConfig, seen: Recorder) -> Iterator[Ranks]:
    """The first of several processes, the others of which are not there.

    What it takes for tensors that it gathers, and gives back, is counted; tensors that only find shapes are not.
    """

    def counted(resize: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
        resize(tensor)
        seen.resize(tensor)

    def apart(*given: Any) -> Any:
        with _disable_current_modes():
            return find_shapes(*given)

    find_shapes = ShardingPropagator._propagate_tensor_meta_non_cached
    with ExitStack() as stack:
        if size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.object(ShardingPropagator, find_shapes.__name__, apart))
        for module, name in (
            (_fsdp_param, "alloc_storage"),
            (_fsdp_param_group, "alloc_storage"),
            (_fsdp_param, "free_storage"),
        ):
            stack.enter_context(patch.object(module, name, partial(counted, getattr(module, name))))
        yield Ranks(0, size, training.parallel)


def inputs_of(model: ModelConfig, training: TrainingConfig) -> StepInputs:
    """Return what a step reads, its batch gathered already."""
    windows = TokenWindows([np.zeros(model.block_size * 64 + 1, dtype=np.uint16)], model.block_size, VOCABULARY)
    order = SampleOrder(window_count=windows.window_count, seed=1, global_batch=training.global_batch)
    tokens = torch.zeros((training.global_batch, model.block_size + 1), dtype=torch.int64)
    drawn, targets = tuple(range(training.global_batch)), training.global_batch * model.block_size
    batch: Any = GatheredBatch(Batch(windows=drawn, tokens=tokens, targets=targets))
    micro = int(training.micro_batch)
    return StepInputs(windows=windows, order=order, training=training, micro_batch=micro, loader=batch)


def one_step(state: TrainState, inputs: StepInputs) -> dict[str, Any]:
    """Launch a step; that of fp16, whose scaler skips bad ones by itself, has no guard."""
    guard = UpdateGuard(state.optimizers, state.device)
    with guard if state.scaler is None else nullcontext():
        launched = launch_step(state, inputs, guard)
    state.ranks.any(False)  # as the loop asks whether to stop
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
