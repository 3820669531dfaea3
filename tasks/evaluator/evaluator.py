"""The evaluator process (`python -m cairn.tasks.evaluator.evaluator`): a spec on stdin, one JSON line on stdout, after
lines with the share of the windows that are measured.

A user's evaluation command gets a model directory in Hugging Face layout and no credentials: its environment is an
allow-list, and it cannot inspect other processes (`confinement.py`).
"""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from cairn.model.data import sample_order, token_windows
from cairn.model.inference.prediction import describe_losses, sample_text, window_losses
from cairn.model.training.determinism import make_deterministic, resolve_device
from cairn.storage.errors import restated
from cairn.storage.logs import run_log
from cairn.storage.stores import object_store, open_store
from cairn.storage.stores.child_process import DEVNULL, guard_group
from cairn.tasks.attempt.injected_faults import IN_EVALUATOR, PAUSES, FaultPlan, inject_process_fault
from cairn.tasks.configuration.settings import METRIC, EvaluatorConfig
from cairn.tasks.errors import TaskError
from cairn.tasks.evaluator import checkpoint_model, confinement
from cairn.tasks.evaluator.evaluation_run import EvaluationSpec, Suite
from cairn.tasks.evaluator.evaluator_process import EvaluationResult, PipeReader
from cairn.tasks.trainer.initial_weights import read_source

MODEL = "{model}"
MOST_PRINTED_BYTES = 1024 * 1024
MOST_METRICS = 1000
WHOLE_UP_TO = 4
"""Held-out text of up to so many times the suite's windows is measured whole: no choice of windows is left to luck."""
_PASSED = """
HOME USER LOGNAME SHELL PATH TERM TZ LANG LANGUAGE LC_ALL LC_CTYPE LC_NUMERIC LD_LIBRARY_PATH LD_PRELOAD
PYTHONPATH PYTHONUTF8 PYTHONHASHSEED PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE VIRTUAL_ENV CONDA_PREFIX
XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME CUDA_PATH CUDA_CACHE_PATH CUBLAS_WORKSPACE_CONFIG
NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
MKL_NUM_THREADS OPENBLAS_NUM_THREADS TORCH_HOME TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR
HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE
TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM NLTK_DATA TIKTOKEN_CACHE_DIR DO_NOT_TRACK
"""
PASSED = frozenset(_PASSED.split())
"""The variables that a command gets besides its own; `CAIRN_EVALUATOR_VARIABLES` names more."""


def _open(spec: EvaluationSpec, device: str) -> checkpoint_model.CheckpointModel:
    return checkpoint_model.open_model(
        open_store.open_store(spec.store_url),
        spec.checkpoint,
        model=spec.plan.model,
        snapshot_id=spec.plan.snapshot_id,
        cache_dir=spec.plan.cache_dir,
        device=resolve_device(device),
        mask_documents=spec.plan.mask_documents,
        allowed_code=spec.plan.allowed_code,
    )


def measure_held_out(
    opened: checkpoint_model.CheckpointModel, suite: Suite, note: Callable[[float], object] = lambda share: None
) -> EvaluationResult:
    """Return the held-out metrics and samples of a network; for each weighted source also `val_loss/SOURCE`.

    `note` gets the share of the windows that are measured.
    """
    sizes = opened.network.config.block_size, opened.snapshot.manifest.vocab_size
    windows = token_windows.TokenWindows(opened.snapshot.val, *sizes, opened.snapshot.val_answers)
    asked = {METRIC: (range(windows.window_count), suite.batches * suite.batch_size)}
    groups, start = [group for group in opened.snapshot.manifest.known_groups if group.val_tokens], 0
    for group in groups:  # those with a whole window; together they cost what the suite costs
        first, count = sample_order.window_range(start, group.val_tokens, windows.block_size)
        start += group.val_tokens
        if count:
            wanted, among = math.ceil(suite.batches / len(groups)) * suite.batch_size, range(first, first + count)
            asked[f"{METRIC}/{group.name}"] = among, wanted
    losses = dict[str, tuple[float, ...]]()
    counts = {name: len(of) if len(of) <= WHOLE_UP_TO * wanted else wanted for name, (of, wanted) in asked.items()}
    total = sum(counts.values())
    for name, (among, _) in asked.items():

        def tell(measured: int, before: int = sum(map(len, losses.values()))) -> None:
            note((before + measured) / total)

        losses[name] = window_losses(opened.network, windows, count=counts[name], among=among, note=tell)
    manifest = opened.snapshot.manifest
    if isinstance(manifest.answers, msgspec.UnsetType):
        metrics = describe_losses(losses[METRIC], bytes_per_token=manifest.bytes_per_token("val"))
    else:  # whose bytes alone are not known
        counted = manifest.answers.val_tokens / manifest.split("val").tokens
        metrics = describe_losses(losses[METRIC], bytes_per_token=None) | {"share_of_answers": counted}
    means = {name: math.fsum(of) / len(of) for name, of in losses.items()}
    samples = tuple(_sample(opened, suite, text) for text in suite.prompts)
    return EvaluationResult(metrics=metrics | means, samples=samples, window_tokens=windows.block_size, losses=losses)


def _measure_by_command(spec: EvaluationSpec, suite: EvaluatorConfig) -> EvaluationResult:
    assert spec.folder is not None
    guard = guard_group()
    (spec.folder / "scratch").mkdir(parents=True)
    checkpoint = spec.checkpoint
    card = f"Step {checkpoint.step} of run {spec.run_id}, manifest sha256 {checkpoint.manifest_sha256}, trained on "
    card += f"data snapshot {spec.plan.snapshot_id}. Written for an evaluator; `cairn export` writes a model card.\n"
    source = read_source(open_store.open_store(spec.store_url), spec.source_sha256) if spec.source_sha256 else None
    # Not bound to a name: the weights are not needed in memory while the command runs.
    checkpoint_model.write_model_directory(spec.folder / "model", _open(spec, "cpu"), card=card, source=source)
    result = run_command(suite, spec)
    del guard  # it has to live until here
    return result


def run_command(suite: EvaluatorConfig, spec: EvaluationSpec) -> EvaluationResult:
    """Run the command on `spec.folder / "model"` and return the numbers it printed, nested names joined by slashes.

    Raises TaskError for a changed file of the suite, a command that fails, or other output than finite numbers.
    """
    for name, expected in (suite.files or {}).items():
        path = Path(suite.folder) / name
        with restated(OSError, TaskError, f"evaluator {suite.name}: {path}: cannot be read"):
            found = object_store.describe_file(path).sha256
        if found != expected:
            problem = f"sha256 {found[:12]}, the suite has {expected[:12]}; it was edited"
            remedy = "start the run's command again with its configuration, or name a suite file with --suite"
            raise TaskError(f"evaluator {suite.name}: {path}: {problem}: {remedy}")
    environment = command_environment(os.environ, spec)
    program, model_dir = suite.command[0], environment["CAIRN_MODEL_DIR"]
    if "/" not in program:
        program = shutil.which(program, path=environment["PATH"]) or program
    command = [program, *(argument.replace(MODEL, model_dir) for argument in suite.command[1:])]
    if not any(MODEL in argument for argument in suite.command):
        command.append(model_dir)
    reported, report = os.pipe()
    with open(reported) as boundary:
        try:
            confined, pipe = [sys.executable, "-I", "-S", confinement.__file__, str(report), *command], subprocess.PIPE
            child = subprocess.Popen(
                confined, cwd=suite.folder, env=environment, stdin=DEVNULL, stdout=pipe, stderr=pipe, pass_fds=[report]
            )
        except OSError as error:
            raise TaskError(f"evaluator {suite.name}: {suite.command[0]}: cannot be started: {error}") from error
        finally:
            os.close(report)
        try:
            return EvaluationResult(boundary=boundary.read(), metrics=_read_metrics(suite.name, child))
        finally:
            child.kill()  # its children are in the evaluator's group and are killed with it
            child.wait()


def _read_metrics(name: str, child: "subprocess.Popen[bytes]") -> dict[str, float]:
    assert child.stdout is not None and child.stderr is not None
    stderr = PipeReader(child.stderr, copy_to=2)
    with child.stdout:
        printed = child.stdout.read(MOST_PRINTED_BYTES + 1)
    if len(printed) > MOST_PRINTED_BYTES:
        raise TaskError(f"evaluator {name} printed nonsense: more than {MOST_PRINTED_BYTES:,} bytes on stdout")
    if child.wait() != 0:
        raise TaskError(f"evaluator {name} exited with {child.returncode}: {stderr.last_line()}")
    return parse_metrics(name, printed)


def parse_metrics(name: str, printed: bytes) -> dict[str, float]:
    """Return the finite numbers of one JSON object; raises TaskError naming the first key that holds anything else."""
    try:
        document = msgspec.json.decode(printed, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        problem = f"evaluator {name} printed nonsense: {error}: {printed[:60].decode(errors='replace')!r}"
        raise TaskError(f"{problem}; rule: stdout is one JSON object") from error
    metrics = dict(_numbers(name, document, ""))
    if not 1 <= len(metrics) <= MOST_METRICS:
        raise TaskError(f"evaluator {name} printed nonsense: {len(metrics)} numbers; rule: 1 to {MOST_METRICS}")
    return metrics


def command_environment(environment: Mapping[str, str], spec: EvaluationSpec) -> dict[str, str]:
    """Return the command's environment: what it may have, with the spec's values; `python` is this interpreter."""
    assert spec.folder is not None
    passed = PASSED.union(environment.get("CAIRN_EVALUATOR_VARIABLES", "").replace(",", " ").split())
    kept = {name: value for name, value in environment.items() if name in passed}
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]),
        "OMP_NUM_THREADS": str(spec.plan.threads),
        "TMPDIR": str(spec.folder / "scratch"),
        "CAIRN_MODEL_DIR": str(spec.folder / "model"),
        "CAIRN_RUN_ID": spec.run_id,
        "CAIRN_STEP": str(spec.checkpoint.step),
        "CAIRN_MANIFEST_SHA256": spec.checkpoint.manifest_sha256,
        "CAIRN_DEVICE": spec.plan.device,
    }


def _numbers(name: str, document: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in document.items():
        where, number = f"{prefix}{key}", math.nan
        if isinstance(value, dict):
            yield from _numbers(name, value, f"{where}/")
            continue
        with suppress(OverflowError):  # an integer too large for a float
            number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not math.isfinite(number):
            problem = f"evaluator {name} printed nonsense: {where} is {str(value)[:80]!r}"
            raise TaskError(f"{problem}; rule: every value is a finite number")
        yield where, number


def main() -> None:
    """Read the spec from stdin, and print the result as the last line on stdout."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def print_line(line: bytes) -> None:
        out.write(line + b"\n")
        out.flush()

    spec = EvaluationSpec.model_validate_json(sys.stdin.buffer.read())
    faults = FaultPlan(open_store.open_store(spec.store_url), run_log.run_prefix(spec.run_id), spec.plan.faults)
    for kind in faults.due(spec.number, IN_EVALUATOR):
        faults.pause(kind, spec.number) if kind in PAUSES else inject_process_fault(kind)
    os.nice(15)  # on shared cores, waiting threads of both processes slow training by a factor of ten
    plan = spec.plan
    seed = plan.suite.sample_seed if isinstance(plan.suite, Suite) else 0
    make_deterministic(seed=seed, threads=plan.threads, arithmetic=plan.arithmetic)
    try:
        if isinstance(plan.suite, EvaluatorConfig):
            result = _measure_by_command(spec, plan.suite)
        else:
            result = measure_held_out(_open(spec, plan.device), plan.suite, lambda share: print_line(b"%.3f" % share))
    except TaskError as error:  # explains itself; any other exception needs its traceback
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    print_line(msgspec.json.encode(result))
    os._exit(0)


def _sample(opened: checkpoint_model.CheckpointModel, suite: Suite, prompt: str) -> str:
    ids, length, seed = opened.prompt_ids(prompt), suite.sample_tokens, suite.sample_seed
    return prompt + sample_text(opened.network, ids, opened.tokenizer.decode, new_tokens=length, seed=seed)


if __name__ == "__main__":
    main()
