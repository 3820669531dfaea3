"""The kernels that Inductor writes for steps on "cuda", compiled by Triton without a device; what they take, as JSON.

python -m tests.cuda.fake_cuda tests.cuda.generated CASE…     a case is JSON
"""

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._inductor import config, graph
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.kernels import head_loss
from cairn.model.training.determinism import make_deterministic
from cairn.model.training.train_state import TrainState
from tests.cuda.fake_cuda import LIKE
from tests.cuda.trace import VOCABULARY, inputs_of, one_step

MULTIPROCESSORS = {80: 108, 90: 132}
"""Of an A100 and an H100, by capability."""
_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)\n'''", re.DOTALL | re.MULTILINE)


class Driver:
    """Answers what Inductor and Triton ask of a device."""

    def __init__(self, capability: int) -> None:
        """Be one of this capability."""
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return the only one."""
        return torch.device("cuda", 0)


class Context(contextlib.nullcontext[None]):
    """Stands for a class whose instances PyTorch asks for."""


def be_device(capability: int) -> None:
    """Make the fake device one of this capability that Inductor writes kernels for."""
    LIKE.major, LIKE.minor = divmod(capability, 10)
    LIKE.multi_processor_count, LIKE.max_threads_per_block = MULTIPROCESSORS[capability], 1024
    answers = {"_get_device_properties": lambda *_: LIKE, "device": Context, "Stream": Context}
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = "12.8"
    triton.runtime.driver.set_active(Driver(capability))
    triton_helpers.set_driver_to_gpu = lambda: None
    config.fx_graph_cache = False
    config.joint_graph_constant_folding = config.shape_padding = False  # they compute with tensors on the device


def written_code(case: Mapping[str, Any]) -> list[str]:
    """Return the modules that Inductor writes for one step of a case, in whose place stand tensors of their shapes."""
    codes = list[str]()

    def keep(lowering: Any) -> Any:
        codes.append(lowering.codegen()[0].value)
        results = [getattr(node, "meta", {}).get("val", node) for node in lowering.graph.output_node().args[0]]
        return SimpleNamespace(call=lambda _: list(map(_like, results)), __file__="", key=None, runner=None)

    graph.GraphLowering.compile_to_module = keep  # type: ignore[method-assign]
    compiled = torch.compile(
        head_loss.loss_and_gradient, fullgraph=True, dynamic=False, options=head_loss.COMPILE_OPTIONS
    )
    head_loss._loss_and_gradient_on = lambda _: compiled  # type: ignore[assignment]
    model = ModelConfig(**{"n_layer": 2, "n_head": 12, "n_embd": 768, "block_size": 1024, **case.get("model", {})})
    own = {"precision": "bf16", "kernels": "fused", "global_batch": 8, "micro_batch": 8, **case.get("training", {})}
    training = TrainingConfig(steps=10, warmup_steps=0, **own)
    make_deterministic(seed=1, threads=1)
    torch._dynamo.reset()
    inputs = inputs_of(model, training)
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = TrainState.create(model, training, VOCABULARY, torch.device("cuda", 0), filled=False)
        one_step(state, inputs)
    return codes


def _like(value: Any) -> Any:
    """Return a tensor of this shape."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def compiled_kernels(codes: list[str], capability: int) -> Iterator[dict[str, Any]]:
    """Yield each kernel's source, and what each of its configurations takes of a multiprocessor."""
    with tempfile.TemporaryDirectory() as folder:
        for name, source in dict(match.groups() for code in codes for match in _KERNEL.finditer(code)).items():
            path = Path(folder, f"{name[:60]}.py")
            path.write_text(source)
            found = importlib.util.spec_from_file_location(path.stem, path)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
            tuner = getattr(module, name)
            sizes = [resources(tuner, choice, capability, Path(folder, "kernel.cubin")) for choice in tuner.configs]
            yield {"name": name, "source": source, "configurations": sizes, "reduces": name.startswith(REDUCING)}


REDUCING = ("triton_red", "triton_per")


def resources(tuner: Any, choice: Any, capability: int, cubin: Path) -> dict[str, Any]:
    """Compile one configuration as Inductor's launcher does, and read what the machine code takes."""
    meta = tuner._create_compile_meta(choice)
    source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = tuner._create_compile_options(choice, meta)
    cubin.write_bytes(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"])
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run([reader, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    used = {word.lower(): int(number) for word, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", told)}
    return {**used, "warps": choice.num_warps, "blocks": choice.kwargs}


def main() -> None:
    """Write and compile the kernels of the cases."""
    found = []
    for case in map(json.loads, sys.argv[1:]):
        be_device(case["capability"])
        found.append(list(compiled_kernels(written_code(case), case["capability"])))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
