"""The evaluator process (`python -m cairn.tasks.evaluator.evaluator`): a spec on stdin, one JSON line on stdout."""

import math
import os
import sys
from dataclasses import asdict

import msgspec

from cairn.model.data.sample_order import window_range
from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.evaluation import evaluate, held_out_loss
from cairn.model.inference.generation import generate
from cairn.model.training.determinism import make_deterministic, resolve_device
from cairn.storage.stores.open_store import open_store
from cairn.tasks.attempt.injected_faults import IN_EVALUATOR, PAUSES, FaultPlan, inject_process_fault
from cairn.tasks.configuration.settings import METRIC
from cairn.tasks.errors import TaskError
from cairn.tasks.evaluator.checkpoint_model import CheckpointModel, open_model, write_model_directory
from cairn.tasks.evaluator.evaluation_suite import CommandSuite, EvaluationResult, EvaluationSpec, Suite
from cairn.tasks.evaluator.evaluator_process import guard_group, run_command


def _open(spec: EvaluationSpec, device: str) -> CheckpointModel:
    return open_model(
        open_store(spec.store_url),
        spec.checkpoint,
        model=spec.model,
        snapshot_id=spec.snapshot_id,
        cache_dir=spec.cache_dir,
        device=resolve_device(device),
        mask_documents=spec.mask_documents,
    )


def measure_held_out(opened: CheckpointModel, suite: Suite) -> EvaluationResult:
    """Return the held-out metrics and samples of a network; for each weighted source also `val_loss/SOURCE`."""
    windows = TokenWindows(opened.snapshot.val, opened.network.config.block_size, opened.snapshot.manifest.vocab_size)
    metrics = evaluate(
        opened.network,
        windows,
        batches=suite.batches,
        batch_size=suite.batch_size,
        bytes_per_token=opened.snapshot.manifest.bytes_per_token("val"),
    )
    measured = {name: float(value) for name, value in asdict(metrics).items()}
    groups, start = opened.snapshot.manifest.known_groups, 0
    for group in groups:  # those with a whole window; together they cost what the suite costs
        first, count = window_range(start, group.val_tokens, windows.block_size)
        start += group.val_tokens
        if count:
            batches, among = math.ceil(suite.batches / len(groups)), range(first, first + count)
            loss, _ = held_out_loss(opened.network, windows, batches=batches, batch_size=suite.batch_size, among=among)
            measured[f"{METRIC}/{group.name}"] = loss
    return EvaluationResult(metrics=measured, samples=tuple(_sample(opened, suite, text) for text in suite.prompts))


def _measure_by_command(spec: EvaluationSpec, suite: CommandSuite) -> EvaluationResult:
    assert spec.folder is not None
    guard = guard_group()
    (spec.folder / "scratch").mkdir(parents=True)
    checkpoint = spec.checkpoint
    card = (
        f"Step {checkpoint.step} of run {spec.run_id}, manifest sha256 {checkpoint.manifest_sha256}, trained on data "
        f"snapshot {spec.snapshot_id}. Written for an evaluator; `cairn export` writes a model card.\n"
    )
    # Not bound to a name: the weights are not needed in memory while the command runs.
    write_model_directory(spec.folder / "model", _open(spec, "cpu"), card=card)
    result = run_command(suite, spec)
    del guard  # it has to live until here
    return result


def main() -> None:
    """Read the spec from stdin, and print the result as the only line on stdout."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    spec = EvaluationSpec.model_validate_json(sys.stdin.buffer.read())
    faults = FaultPlan(open_store(spec.store_url), spec.run_prefix, spec.faults)
    for kind in faults.due(spec.number, IN_EVALUATOR):
        faults.pause(kind, spec.number) if kind in PAUSES else inject_process_fault(kind)
    os.nice(15)  # on shared cores, waiting threads of both processes slow training by a factor of ten
    make_deterministic(seed=spec.suite.sample_seed if isinstance(spec.suite, Suite) else 0, threads=spec.threads)
    try:
        if isinstance(spec.suite, CommandSuite):
            result = _measure_by_command(spec, spec.suite)
        else:
            result = measure_held_out(_open(spec, spec.device), spec.suite)
    except TaskError as error:  # explains itself; any other exception needs its traceback
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


if __name__ == "__main__":
    main()
