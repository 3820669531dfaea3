"""The table of termination reasons: one row per real end, its evidence taken from a real process."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cairn.tasks.policy.failures import ErrorKind, Evidence, ExceptionReport, Failure, classify
from cairn.tasks.policy.termination import TerminationReason
from tests.device import device_under_test
from tests.tasks.real_ends.ends import (
    BAD_ALLOC,
    NULL_POINTER,
    Produce,
    Stage,
    alone,
    beside_somebody_the_kernel_killed,
    ended_by_itself,
    ended_by_kubernetes,
    fenced,
    killed_at,
    killed_by_the_kernel,
    killed_in_a_shell,
    notified,
    notified_with_too_little_grace,
    on_cuda,
    play_scenes,
    scene,
    sent,
    silent,
    small_disk,
    store_out_of_reach,
    without_machines,
)
from tests.tasks.real_ends.scenes import SCENES

pytestmark = [
    pytest.mark.linux,  # its ends need /proc, control groups, glibc and /dev/full
    pytest.mark.xdist_group("real-ends"),  # the scenes are played once for all its tests
]


ROWS: dict[str, dict[str, tuple[Produce, str]]] = {
    "preempted": {
        "SIGTERM to the flow": (alone(notified, signal.SIGTERM), "SIGTERM announced the end of this machine"),
        "Slurm's SIGUSR1 to the flow": (alone(notified, signal.SIGUSR1), "the scheduler announced with SIGUSR1"),
        "SIGTERM and too little grace": (alone(notified_with_too_little_grace), "the grace period was too short"),
        "SIGTERM before the trainer listens": (alone(sent, signal.SIGTERM), "SIGTERM before it could stop cleanly"),
        "exit code of a preemption": (alone(ended_by_itself, "raise SystemExit(75)"), "exit code of a preemption"),
        "evicted by Kubernetes": (alone(ended_by_kubernetes, "Evicted"), "Kubernetes ended the container: Evicted"),
    },
    "lost": {
        "bare SIGKILL": (alone(sent, signal.SIGKILL), "killed by SIGKILL and left no other evidence"),
        "bare 137 of a shell": (alone(killed_in_a_shell), "killed by SIGKILL"),
        "SIGKILL with memory to spare": (alone(killed_at, 0.5), "left no other evidence; it used up to"),
        "parent gone": (scene("orphaned"), "found that its parent had died"),
        "nothing known": (lambda stage: Evidence(), "vanished"),
    },
    "oom": {
        "killed by the kernel for memory": (
            alone(killed_by_the_kernel),
            "the kernel killed 1 process(es) of this control group for memory",
        ),
        "SIGKILL at the memory limit": (alone(killed_at, 0.99), "killed by SIGKILL; it used up to"),
        "CPU allocator": (
            scene("cpu-allocator"),
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes",
        ),
        "MemoryError": (scene("python-allocator"), "MemoryError"),
        "numpy's allocator": (scene("array-allocator"), "Unable to allocate 8.00 GiB"),
        "abort of a C++ allocator": (alone(ended_by_itself, BAD_ALLOC), "killed by SIGABRT:   what():  std::bad_alloc"),
        "OOMKilled by Kubernetes": (
            alone(ended_by_kubernetes, "OOMKilled"),
            "Kubernetes ended the container: OOMKilled",
        ),
    },
    "bad-data": {
        "flipped byte in a shard": (scene("flipped-byte"), "sha256 is"),
        "shard of another tokenizer": (scene("foreign-shard"), "cairn.tokenizer_sha256 is"),
        "flipped byte after verification": (
            scene("flipped-byte-after-verification"),
            "window 2: token id 276 is outside the vocabulary of 61",
        ),
        "not a number from two samples": (scene("poisoned-batch"), "in 2 window(s) of its batch and in no other"),
        "data snapshot gone": (scene("missing-data"), "no such data snapshot"),
    },
    "diverged": {
        "not a number from every sample": (scene("broken-weights"), "loss is nan"),
        "loss far above its course": (scene("exploded-loss"), "since step 65"),
    },
    "storage": {
        "closed port": (scene("closed-port"), "Could not connect to the endpoint"),
        "store is no folder": (scene("store-is-no-folder"), "a file stands where the store's folder should be"),
        "store's disk full": (scene("full-disk"), "No space left on device"),
        "spool's disk full": (scene("full-spool"), "No space left on device"),
        "folder without permission": (scene("no-permission"), "Permission denied"),
        "checkpoint damaged": (scene("damaged-checkpoint"), "sha256 is"),
        "checkpoint gone": (scene("missing-checkpoint"), "manifest.json: missing"),
        "disk that keeps nothing": (scene("not-durable"), "is visible, but"),
        "log out of the parent's reach": (alone(store_out_of_reach), "store"),
    },
    "hung": {
        "hang": (alone(silent), "its own steps allowed"),
    },
    "too-few-machines": {
        "no other machine": (alone(without_machines), "1 of 3 machines were here"),
    },
    "fenced": {
        "zombie": (alone(fenced), "attempt 1 is fenced by attempt 2"),
    },
    "cancelled": {
        "Ctrl-C": (alone(notified, signal.SIGINT), "a person interrupted it"),
        "cancelled in Prefect": (
            lambda stage: replace(notified(signal.SIGTERM, stage.folder), cancelling=True),
            "a person cancelled it in Prefect",
        ),
    },
    "error": {
        "missing module": (scene("missing-module"), "ModuleNotFoundError: No module named 'no_such_module'"),
        "missing module before the trainer can speak": (
            alone(ended_by_itself, "import no_such_module"),
            "exited with 1: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        "missing name": (scene("missing-name"), "cannot import name 'no_such_name'"),
        "null pointer": (alone(ended_by_itself, NULL_POINTER), "killed by SIGSEGV: nothing on stderr"),
        "sent SIGSEGV": (alone(sent, signal.SIGSEGV), "killed by SIGSEGV"),
        "null pointer beside somebody the kernel killed": (
            alone(beside_somebody_the_kernel_killed),
            "killed by SIGSEGV",
        ),
        "left without a word": (alone(ended_by_itself, "pass"), "exited with 0: nothing on stderr"),
    },
}
"""By the reason that it must get, every real end and a part of the words that people read of it."""
ENDS = {f"{name} → {reason}": (reason, *row) for reason, rows in ROWS.items() for name, row in rows.items()}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Evidence]]:
    """Every scene of a trainer that speaks, each played in a process of its own."""
    folder = tmp_path_factory.mktemp("real-ends")
    with small_disk(folder / "disk") as disk:
        more = [f"full-disk={disk}"] if disk else []
        yield play_scenes(folder / "scenes", [*SCENES, *more])


@pytest.fixture
def stage(played: dict[str, Evidence], tmp_path: Path) -> Stage:
    return Stage(played=played, folder=tmp_path)


@pytest.mark.parametrize(("reason", "produce", "detail"), ENDS.values(), ids=ENDS)
def test_a_real_end_gets_its_reason(reason: str, produce: Produce, detail: str, stage: Stage) -> None:
    failure = classify(produce(stage))
    assert failure.reason == reason, failure
    assert detail in failure.detail


@pytest.mark.gpu
def test_the_allocator_of_cuda_gets_its_reason_too(tmp_path: Path) -> None:
    if device_under_test().type != "cuda":
        pytest.skip("says something of CUDA alone")
    failure = classify(on_cuda(Stage(played={}, folder=tmp_path)))
    assert failure.reason == TerminationReason.OOM and "CUDA out of memory" in failure.detail


def test_every_reason_has_a_real_end() -> None:
    no_failures = {TerminationReason.COMPLETED, TerminationReason.PAUSED}  # tests/wiring pauses real sets of runs
    assert ROWS.keys() == set(TerminationReason) - no_failures


@pytest.mark.parametrize(
    ("one", "other"),
    [("cpu-allocator", "cpu-allocator-again"), ("poisoned-batch", "poisoned-batch-again")],
)
def test_equal_causes_share_a_fingerprint(stage: Stage, one: str, other: str) -> None:
    assert classify(stage.scene(one)).fingerprint == classify(stage.scene(other)).fingerprint


def test_different_causes_have_different_fingerprints(stage: Stage) -> None:
    names = [name for name in stage.played if not name.endswith("-again")]
    prints = {name: classify(stage.played[name]).fingerprint for name in names}
    assert len(set(prints.values())) == len(names), prints


def test_the_same_crash_of_two_processes_shares_a_fingerprint(tmp_path: Path) -> None:
    code = "raise RuntimeError(f'no answer from {id(object()):#x} of process {__import__(\"os\").getpid()}')"
    first, second = ended_by_itself(code, tmp_path), ended_by_itself(code, tmp_path)
    assert first.stderr_tail != second.stderr_tail
    assert classify(first).fingerprint == classify(second).fingerprint


def test_an_abort_explains_itself_above_the_trace_of_its_stack(tmp_path: Path) -> None:
    evidence = ended_by_itself(BAD_ALLOC, tmp_path, "-X", "faulthandler")
    assert "  File " in evidence.stderr_tail[-1]
    assert classify(evidence).reason == TerminationReason.OOM


def words(**changes: object) -> ExceptionReport:
    line = '  File "/somewhere/tasks/trainer/trainer.py", line 7, in main\n    go()\n'
    report = ExceptionReport(kind=ErrorKind.BUG, exception="ValueError", message="no", traceback=(line,))
    return replace(report, **changes)


def spoken(**changes: object) -> Failure:
    return classify(Evidence(exit_code=1, last_words=words(**changes)))


def test_the_same_line_installed_elsewhere_is_the_same_cause() -> None:
    elsewhere = words().traceback[0].replace("/somewhere/", "/else/where/")
    assert spoken(traceback=(elsewhere,)).fingerprint == spoken().fingerprint


@pytest.mark.parametrize(
    "changes", [{"exception": "KeyError"}, {"traceback": ()}, {"windows": (3,)}], ids=["exception", "line", "samples"]
)
def test_another_exception_line_or_sample_is_another_cause(changes: dict[str, object]) -> None:
    assert spoken(**changes).fingerprint != spoken().fingerprint


STRONGEST_FIRST = [
    ("completed", {"finished": True}),
    ("fenced", {"fenced": "attempt 1 is fenced by attempt 2"}),
    ("cancelled", {"cancelling": True}),
    ("preempted", {"stop_signal": "aws", "notice": "AWS announced: terminate at noon"}),
    ("too-few-machines", {"too_few_machines": "1 of 2 machines were here after 30 s"}),
    ("paused", {"too_dear": "cost.limit = 2 device hours: 1.9 device hours spent"}),
    ("paused", {"paused": "waits for rung 1 of 2: the best 2 of 4 runs of its set go on"}),
    ("hung", {"silent_seconds": 700.0, "allowed_seconds": 600.0}),
    ("storage", {"store_error": "AccessDenied", "store_error_kind": ErrorKind.REFUSED}),
    ("error", {"last_words": words()}),
    ("storage", {"store_error": "the store is away", "store_error_kind": ErrorKind.UNAVAILABLE}),
    ("oom", {"kubernetes_reason": "OOMKilled"}),
    ("oom", {"oom_kills": 1}),
    ("lost", {"exit_code": -signal.SIGKILL}),
]


@pytest.mark.parametrize("place", range(len(STRONGEST_FIRST)), ids=[f"{name}" for name, _ in STRONGEST_FIRST])
def test_stronger_evidence_wins_over_all_weaker(place: int) -> None:
    evidence = Evidence()
    for _, known in reversed(STRONGEST_FIRST[place:]):
        evidence = replace(evidence, **known)
    assert classify(evidence).reason == STRONGEST_FIRST[place][0]


def test_what_a_notice_said_is_passed_on() -> None:
    evidence = Evidence(stop_signal="aws", notice="AWS announced: terminate at noon")
    assert classify(evidence).detail == "AWS announced: terminate at noon"


def test_a_reason_kubernetes_does_not_explain_leaves_the_other_evidence() -> None:
    evidence = Evidence(exit_code=-signal.SIGKILL, kubernetes_reason="Error")
    assert classify(evidence).reason == TerminationReason.LOST
