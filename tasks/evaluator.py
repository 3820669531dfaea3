"""The evaluator: a child process that measures one committed checkpoint and prints one JSON line.

Run as `python -m tasks.evaluator`, order on stdin. Owns nothing durable; a crash here is its own and touches neither
the run nor the weights.
"""

import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from pydantic import BaseModel, ConfigDict

from model.configuration import ModelConfig
from model.determinism import make_deterministic, resolve_device
from model.evaluation import evaluate
from model.generation import generate
from model.token_windows import TokenWindows
from storage.open_store import open_store
from storage.run_entries import CheckpointReference
from tasks.checkpoint_model import CheckpointModel, open_model, prompt_ids
from tasks.evaluation_suite import Suite
from tasks.practice_faults import EVALUATOR, due, parse_faults, strike_process

_NICENESS = 15
"""Training goes first: threads of both that wait for each other on the same cores cost it nine tenths of its speed."""


class EvaluationOrder(BaseModel):
    """Everything an evaluator needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store_url: str
    snapshot_id: str
    model: ModelConfig
    checkpoint: CheckpointReference
    suite: Suite
    cache_dir: Path
    device: str
    threads: int
    mask_documents: bool = False
    run_prefix: str = ""
    number: int = 0
    faults: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """What was measured: losses in nats per token, and the text after each prompt."""

    metrics: dict[str, float]
    samples: tuple[str, ...]


def measure(order: EvaluationOrder) -> EvaluationResult:
    """Load the weights, measure the suite's slice, write its samples."""
    device = resolve_device(order.device)
    opened = open_model(
        open_store(order.store_url),
        order.checkpoint,
        model=order.model,
        snapshot_id=order.snapshot_id,
        cache_dir=order.cache_dir,
        device=device,
        mask_documents=order.mask_documents,
    )
    windows = TokenWindows(opened.snapshot.val, order.model.block_size, opened.snapshot.manifest.vocab_size)
    metrics = evaluate(
        opened.network,
        windows,
        batches=order.suite.batches,
        batch_size=order.suite.batch_size,
        bytes_per_token=opened.snapshot.bytes_per_token("val"),
    )
    samples = tuple(_sample(opened, order.suite, prompt) for prompt in order.suite.prompts)
    return EvaluationResult(metrics={name: float(value) for name, value in asdict(metrics).items()}, samples=samples)


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
    make_deterministic(seed=order.suite.sample_seed, threads=order.threads)
    out.write(msgspec.json.encode(measure(order)) + b"\n")
    out.flush()
    os._exit(0)


def _sample(opened: CheckpointModel, suite: Suite, prompt: str) -> str:
    ids = generate(
        opened.network,
        prompt_ids(opened.tokenizer, prompt),
        new_tokens=suite.sample_tokens,
        temperature=0.8,
        top_k=50,
        seed=suite.sample_seed,
    )
    return prompt + opened.tokenizer.decode(ids)


def _leave_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
