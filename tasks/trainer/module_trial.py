"""Tries a network of one's own in a child: whether it can be trained at all, its size, and the memory of one step.

Only the child, `python -m cairn.tasks.trainer.module_trial`, imports torch and runs the module's files.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil

from pydantic import BaseModel, ConfigDict

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.estimates.size_estimate import DEVICE_RUNTIME_BYTES, RUNTIME_BYTES, MemoryEstimate
from cairn.model.estimates.step_memory import FP32_BYTES
from cairn.storage.stores.codec import decode, encode
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.machine_speed import run_child
from cairn.tasks.policy.attempt_sizes import AttemptSizes

_TIMEOUT_SECONDS, _TAIL_LINES = 600.0, 6


class _Trial(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    model: ModelConfig
    training: TrainingConfig
    files: dict[str, bytes]
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    parameters: int = 0
    state_bytes: int = 0
    peak_bytes: int = 0
    on_cuda: bool = False
    problem: str = ""


def try_module(
    model: ModelConfig, training: TrainingConfig, files: Mapping[str, bytes], vocab_size: int, sizes: AttemptSizes
) -> MemoryEstimate:
    """Return the memory of a trainer of this module by one step here; raises InvalidConfiguration if it takes none."""
    numerics = {"precision": "fp32"} if training.precision == "auto" else {}
    chosen: dict[str, object] = {**numerics, "kernels": "stock", "micro_batch": sizes.micro_batch}
    chosen["activation_checkpointing"] = sizes.activation_checkpointing
    trial = _Trial(model=model, training=training.model_copy(update=chosen), files=dict(files), vocab_size=vocab_size)
    tried = _try(trial.model_dump_json().encode())
    if tried.problem:
        raise InvalidConfiguration(tried.problem)
    weights, sums = FP32_BYTES * tried.parameters, (ceil(training.global_batch / sizes.micro_batch) - 1).bit_length()
    runtime = DEVICE_RUNTIME_BYTES if tried.on_cuda else RUNTIME_BYTES
    known = tried.state_bytes + weights + (0 if tried.on_cuda else runtime)
    return MemoryEstimate(
        parameters_bytes=weights,
        gradients_bytes=weights * (1 + max(0, sums - 1)),
        optimizer_bytes=tried.state_bytes - weights,
        activations_bytes=max(0, tried.peak_bytes - known),
        logits_bytes=0,
        host_copy_bytes=0 if tried.on_cuda else tried.state_bytes,
        runtime_bytes=runtime,
        allocator_bytes=0,
        evaluator_bytes=runtime + 2 * weights,
    )


@cache
def _try(trial: bytes) -> _Tried:
    try:
        printed = run_child("cairn.tasks.trainer.module_trial", given=trial, limit_seconds=_TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        last = "\n".join(said.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:])
        raise InvalidConfiguration(f"model.module: one step of it was tried, and failed:\n{last}") from error
    return decode(printed, _Tried, where="the trial of a module")


def _take_step(trial: _Trial) -> _Tried:
    import torch

    from cairn.model.training import determinism, training_step
    from cairn.model.training.optimizer import update_weights
    from cairn.model.training.train_state import TrainState

    training = trial.training
    determinism.make_deterministic(seed=training.seed, threads=training.threads, arithmetic=training.arithmetic)
    device = determinism.resolve_device(training.device)
    state = TrainState.create(trial.model, training, trial.vocab_size, device, files=trial.files)
    assert isinstance(training.micro_batch, int)
    tokens = torch.randint(trial.vocab_size, (training.micro_batch, trial.model.block_size + 1))  # (b, T+1)
    loss = training_step.mean_loss(state, tokens, training)
    loss.backward()
    update_weights(state.optimizers)
    is_cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _Tried(
        parameters=state.model.parameter_count,
        state_bytes=sum(one.tensor.nbytes for one in state.live_tensors()),
        peak_bytes=peak if is_cuda or sys.platform == "darwin" else peak * 1024,
        on_cuda=is_cuda,
    )


def main() -> None:
    """Read a trial from stdin, and print what came of it as JSON; what the module prints goes to stderr."""
    from cairn.model.errors import InvalidInput

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    trial = _Trial.model_validate_json(sys.stdin.buffer.read())
    try:
        tried = _take_step(trial)
    except InvalidInput as error:
        tried = _Tried(problem=str(error))
    out.write(encode(tried))
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
