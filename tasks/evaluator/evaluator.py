"""The evaluator: a child process that measures one committed checkpoint and prints one JSON line.

Run as `python -m tasks.evaluator.evaluator` with its order on stdin. A crash here touches neither the run nor the
weights.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from pydantic import BaseModel, ConfigDict

from model.configuration.network import ModelConfig
from model.data.token_windows import TokenWindows
from model.inference.evaluation import evaluate
from model.inference.generation import generate
from model.training.determinism import make_deterministic, resolve_device
from storage.logs.log_entry import CheckpointReference
from storage.stores.open_store import open_store
from tasks.errors import TaskError
from tasks.evaluator.checkpoint_model import CheckpointModel, open_model
from tasks.evaluator.command_evaluator import CommandOrder, guard_group, run_command
from tasks.evaluator.evaluation_suite import CommandSuite, Suite
from tasks.evaluator.model_directory import write_model_directory
from tasks.trainer.fault_injection import EVALUATOR, due, parse_faults, strike_process

_NICENESS = 15
"""Training goes first: threads of both that wait for each other on the same cores cost it nine tenths of its speed."""


class EvaluationOrder(BaseModel):
    """Everything an evaluator needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store_url: str
    snapshot_id: str
    model: ModelConfig
    checkpoint: CheckpointReference
    suite: Suite | CommandSuite
    cache_dir: Path
    device: str
    threads: int
    mask_documents: bool = False
    folder: Path | None = None
    run_id: str = ""
    run_prefix: str = ""
    number: int = 0
    faults: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """What was measured: losses in nats per token, and the text after each prompt."""

    metrics: dict[str, float]
    samples: tuple[str, ...]


def measure(order: EvaluationOrder) -> EvaluationResult:
    """Load the weights and measure them under the order's suite."""
    if isinstance(order.suite, CommandSuite):
        return _measure_by_command(order, order.suite)
    return _measure_held_out(_open(order), order.suite)


def _open(order: EvaluationOrder, device: str | None = None) -> CheckpointModel:
    return open_model(
        open_store(order.store_url),
        order.checkpoint,
        model=order.model,
        snapshot_id=order.snapshot_id,
        cache_dir=order.cache_dir,
        device=resolve_device(device or order.device),
        mask_documents=order.mask_documents,
    )


def _measure_held_out(opened: CheckpointModel, suite: Suite) -> EvaluationResult:
    windows = TokenWindows(opened.snapshot.val, opened.network.config.block_size, opened.snapshot.manifest.vocab_size)
    metrics = evaluate(
        opened.network,
        windows,
        batches=suite.batches,
        batch_size=suite.batch_size,
        bytes_per_token=opened.snapshot.bytes_per_token("val"),
    )
    samples = tuple(_sample(opened, suite, prompt) for prompt in suite.prompts)
    return EvaluationResult(metrics={name: float(value) for name, value in asdict(metrics).items()}, samples=samples)


def _measure_by_command(order: EvaluationOrder, suite: CommandSuite) -> EvaluationResult:
    """Write the model into the order's folder, where the command finds it; the parent removes the folder."""
    if order.folder is None:
        raise TaskError(f"evaluator {suite.name}: the order names no folder for the model")
    told = CommandOrder(
        model_dir=order.folder / "model",
        scratch_dir=order.folder / "scratch",
        run_id=order.run_id,
        reference=order.checkpoint,
        device=order.device,
        threads=order.threads,
    )
    guard = guard_group()
    told.scratch_dir.mkdir(parents=True)
    # Not bound to a name: the weights need not be kept in memory while the command runs.
    write_model_directory(told.model_dir, _open(order, "cpu"), card=_card(order))
    metrics = run_command(suite, told)
    del guard  # it has to live until here
    return EvaluationResult(metrics=metrics, samples=())


def _card(order: EvaluationOrder) -> str:
    return (
        f"Step {order.checkpoint.step} of run {order.run_id}, manifest sha256 {order.checkpoint.manifest_sha256}, "
        f"trained on data snapshot {order.snapshot_id}. Written for an evaluator; `cairn export` writes a model card.\n"
    )


def main() -> None:
    """Read the order from stdin, print the result as the only line on stdout."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    order = EvaluationOrder.model_validate_json(sys.stdin.buffer.read())
    for kind in due(
        parse_faults(order.faults), open_store(order.store_url), order.run_prefix, order.number, kinds=(EVALUATOR,)
    ):
        strike_process(kind)
    os.nice(_NICENESS)
    seed = order.suite.sample_seed if isinstance(order.suite, Suite) else 0
    make_deterministic(seed=seed, threads=order.threads)
    try:
        result = measure(order)
    except TaskError as error:  # said in words; anything else shows where it happened
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    out.write(msgspec.json.encode(result) + b"\n")
    out.flush()
    os._exit(0)


def _sample(opened: CheckpointModel, suite: Suite, prompt: str) -> str:
    ids = generate(
        opened.network,
        opened.tokenizer.encode_prompt(prompt),
        new_tokens=suite.sample_tokens,
        temperature=0.8,
        top_k=50,
        seed=suite.sample_seed,
    )
    return prompt + opened.tokenizer.decode(ids)


def _leave_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # what an evaluator started leaves with it
    os._exit(1)


if __name__ == "__main__":
    main()
