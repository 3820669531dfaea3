"""Tries a network of one's own in a child: whether it can be trained at all, its size, and the memory of one step.

Only the child imports torch and runs the module's files.
"""

import resource
import subprocess
import sys
from dataclasses import asdict
from functools import cache

from pydantic import BaseModel, ConfigDict

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.errors import InvalidInput
from cairn.model.estimates.size_estimate import DEVICE_RUNTIME_BYTES, RUNTIME_BYTES, MemoryEstimate
from cairn.model.estimates.step_memory import FP32_BYTES
from cairn.storage.stores.child_process import call_child
from cairn.storage.stores.codec import decode
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.policy.attempt_sizes import AttemptSizes

_TIMEOUT_SECONDS, _TAIL_LINES = 600.0, 6


class _Trial(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    model: ModelConfig
    training: TrainingConfig
    files: dict[str, bytes]
    vocab_size: int


def try_module(config: RunConfig, vocab_size: int, sizes: AttemptSizes) -> MemoryEstimate:
    """Return the memory of a trainer of this module, by one step here; raises InvalidConfiguration if it takes none."""
    auto = {"precision": "fp32"} if config.training.precision == "auto" else {}
    chosen = {**auto, **asdict(sizes), "kernels": "stock"}
    training, files = config.training.model_copy(update=chosen), config.code.files
    trial = _Trial(model=config.model, training=training, files=files, vocab_size=vocab_size)
    return _try(trial.model_dump_json().encode())


@cache
def _try(trial: bytes) -> MemoryEstimate:
    try:
        printed = call_child(__name__, given=trial, limit_seconds=_TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        last = "\n".join(said.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:])
        raise InvalidConfiguration(f"model.module: one step of it was tried, and failed:\n{last}") from error
    return decode(printed, MemoryEstimate, where="the trial of a module")


def _take_step(trial: _Trial) -> MemoryEstimate:
    import torch

    from cairn.model.training import determinism, optimizer, train_state, training_step

    training, micro_batch = trial.training, int(trial.training.micro_batch)
    determinism.make_deterministic(seed=training.seed, threads=training.threads, arithmetic=training.arithmetic)
    device = determinism.resolve_device(training.device)
    state = train_state.TrainState.create(trial.model, training, trial.vocab_size, device, files=trial.files)
    tokens = torch.randint(trial.vocab_size, (micro_batch, trial.model.block_size + 1))  # (b, T+1)
    training_step.mean_loss(state, tokens, training).backward()
    optimizer.update_weights(state.optimizers)
    on_cuda, unit = device.type == "cuda", 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - RUNTIME_BYTES
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else peak
    weights, kept = FP32_BYTES * state.model.parameter_count, sum(one.tensor.nbytes for one in state.live_tensors())
    sums = (-(-training.global_batch // micro_batch) - 1).bit_length()
    runtime = DEVICE_RUNTIME_BYTES if on_cuda else RUNTIME_BYTES
    return MemoryEstimate(
        parameters_bytes=weights,
        gradients_bytes=weights * max(1, sums),
        optimizer_bytes=kept - weights,
        activations_bytes=max(0, peak - kept - weights),
        logits_bytes=0,
        host_copy_bytes=0 if on_cuda else kept,
        runtime_bytes=runtime,
        allocator_bytes=0,
        evaluator_bytes=runtime + 2 * weights,
    )


def run() -> MemoryEstimate:
    """Return the memory that the trial on stdin takes; the files may leave with any message."""
    try:
        return _take_step(_Trial.model_validate_json(sys.stdin.buffer.read()))
    except InvalidInput as error:  # explains itself
        sys.exit(str(error))
