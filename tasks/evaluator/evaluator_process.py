"""Runs an evaluator process from its parent's side, and inside of it a user's evaluation command: both print JSON.

An evaluator's time and output are limited, and its whole group is killed before its leader is reaped, so that no other
process can have taken its number. A command gets a model directory in Hugging Face layout and no credentials: its
environment is an allow-list, and it is kept from looking into other processes (`confinement.py`).
"""

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from cairn.storage.stores.child_process import child_command, end_child, start_child
from cairn.storage.stores.object_store import describe_file
from cairn.tasks.errors import EvaluationInterrupted, TaskError
from cairn.tasks.evaluator import confinement
from cairn.tasks.evaluator.evaluation_suite import AnySuite, CommandSuite, EvaluationResult, EvaluationSpec

EVALUATOR_COMMAND = child_command("cairn.tasks.evaluator.evaluator")
MOST_STDOUT_BYTES = 8 * 1024 * 1024
_TAIL_BYTES = 64 * 1024
_POLL_SECONDS = 0.1
_DRAIN_SECONDS = 5.0
MODEL = "{model}"
MOST_PRINTED_BYTES = 1024 * 1024
MOST_METRICS = 1000
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
COMMANDS, ALLOWED, LOGGED = "CAIRN_EVALUATOR_COMMANDS", "allow", "log"
"""`allow`, the default, runs commands of this machine's configurations; `log` runs those of logs too; others none."""
_GUARD = "import os, signal; os.read(0, 1); os.killpg(0, signal.SIGKILL)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the evaluator printed, or what was wrong with it; `refused`: it was not started."""

    result: bytes
    problem: str
    refused: bool = False


class PipeReader:
    """Reads a pipe in a thread of its own and keeps its first bytes, or its last; the rest is discarded."""

    def __init__(
        self, pipe: IO[bytes], *, most_bytes: int, keep_last: bool = False, copy_to: int | None = None
    ) -> None:
        """Start reading; `copy_to` is a file descriptor that gets a copy of everything."""
        self._pipe, self._most_bytes, self._keep_last, self._copy_to = pipe, most_bytes, keep_last, copy_to
        self._kept, self.overflowed = bytearray(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def read(self) -> bytes:
        """Wait up to 5 s for the end of the pipe and return what was kept."""
        self._thread.join(_DRAIN_SECONDS)
        return bytes(self._kept)

    def last_line(self) -> str:
        """Return the last line that is not blank."""
        lines = self.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "nothing on stderr"

    def _run(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), 65536):
                self._kept += chunk
                if len(self._kept) > self._most_bytes:
                    self.overflowed = True
                    self._kept = self._kept[-self._most_bytes :] if self._keep_last else self._kept[: self._most_bytes]
                if self._copy_to is not None:
                    os.write(self._copy_to, chunk)


def run_evaluator(
    spec: bytes,
    timeout_seconds: float,
    *,
    stopping: Callable[[], bool] = lambda: False,
    command: Sequence[str] = EVALUATOR_COMMAND,
) -> Outcome:
    """Return the outcome of an evaluator with an encoded spec, failed or not; `EvaluationInterrupted` if `stopping`."""
    try:
        child = start_child(command)
    except OSError as error:  # for example no memory or no process left
        return Outcome(result=b"", problem=f"the evaluator could not be started: {error}")
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    stdout = PipeReader(child.stdout, most_bytes=MOST_STDOUT_BYTES)
    stderr = PipeReader(child.stderr, most_bytes=_TAIL_BYTES, keep_last=True)
    stdin = child.stdin

    def write() -> None:
        with suppress(BrokenPipeError), stdin:
            stdin.write(spec)

    threading.Thread(target=write, daemon=True).start()
    try:
        problem = _wait(child, stdout, timeout_seconds, stopping)
    finally:
        end_child(child)
    if not problem and child.returncode != 0:
        problem = f"the evaluator exited with {child.returncode}: {stderr.last_line()}"
    return Outcome(result=b"" if problem else stdout.read(), problem=problem)


def _wait(
    child: subprocess.Popen[bytes], stdout: PipeReader, timeout_seconds: float, stopping: Callable[[], bool]
) -> str:
    """Wait for the child's exit without reaping it; return why it has to be killed, or an empty text."""
    deadline = time.monotonic() + timeout_seconds
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if stdout.overflowed:
            return f"the evaluator printed nonsense: more than {MOST_STDOUT_BYTES:,} bytes"
        if stopping():
            raise EvaluationInterrupted("the evaluation was interrupted because the run is leaving")
        if time.monotonic() >= deadline:
            return f"the evaluator did not answer within {timeout_seconds:g} s"
        time.sleep(_POLL_SECONDS)
    return ""


def run_command(suite: CommandSuite, spec: EvaluationSpec) -> EvaluationResult:
    """Run the command on `spec.folder / "model"` and return the numbers it printed, nested names joined by slashes.

    Raises TaskError for a changed file of the suite, a command that fails, or other output than finite numbers.
    """
    _check_files(suite)
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
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", confinement.__file__, str(report), *command],
                cwd=suite.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[report],
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


def refuse_command(suite: AnySuite, environment: Mapping[str, str]) -> str:
    """Return why this machine does not run the suite's command; empty if it does, or if the suite has none."""
    allowed, problem = environment.get(COMMANDS, ALLOWED), ""
    if isinstance(suite, CommandSuite) and allowed not in (ALLOWED, LOGGED):
        problem = f"this machine runs no evaluator's command ({COMMANDS} is not `{ALLOWED}`)"
    elif isinstance(suite, CommandSuite) and suite.logged and allowed != LOGGED:
        problem = (
            "only the run's log names its command, so it was not run; name it in this machine's configuration or with "
            f"--suite, or set {COMMANDS}={LOGGED} to run the commands of logs"
        )
    return f"evaluator {suite.name}: {problem}" if problem else ""


def _read_metrics(name: str, child: "subprocess.Popen[bytes]") -> dict[str, float]:
    assert child.stdout is not None and child.stderr is not None
    stderr = PipeReader(child.stderr, most_bytes=_TAIL_BYTES, keep_last=True, copy_to=2)
    with child.stdout:
        printed = child.stdout.read(MOST_PRINTED_BYTES + 1)
    if len(printed) > MOST_PRINTED_BYTES:
        raise TaskError(f"evaluator {name} printed nonsense: more than {MOST_PRINTED_BYTES:,} bytes on stdout")
    code = child.wait()
    if code != 0:
        raise TaskError(f"evaluator {name} exited with {code}: {stderr.last_line()}")
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
        "OMP_NUM_THREADS": str(spec.threads),
        "TMPDIR": str(spec.folder / "scratch"),
        "CAIRN_MODEL_DIR": str(spec.folder / "model"),
        "CAIRN_RUN_ID": spec.run_id,
        "CAIRN_STEP": str(spec.checkpoint.step),
        "CAIRN_MANIFEST_SHA256": spec.checkpoint.manifest_sha256,
        "CAIRN_DEVICE": spec.device,
    }


def guard_group() -> "subprocess.Popen[bytes] | None":
    """Start a guard that kills this process's group when this process exits, even by SIGKILL.

    It waits for the end of its stdin, so keep the returned process; None if this process does not lead its group.
    """
    if os.getpgrp() != os.getpid():
        return None
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _check_files(suite: CommandSuite) -> None:
    for name, expected in suite.files.items():
        path = Path(suite.folder) / name
        try:
            found = describe_file(path).sha256
        except OSError as error:
            raise TaskError(f"evaluator {suite.name}: {path}: cannot be read: {error}") from error
        if found != expected:
            raise TaskError(
                f"evaluator {suite.name}: {path}: sha256 {found[:12]}, the suite has {expected[:12]}; it was edited: "
                "start the run's command again with its configuration, or name a suite file with --suite"
            )


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
