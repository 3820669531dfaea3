"""The table of termination reasons: one row per real end, its evidence taken from a real process."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A real end, the reason it must get, and a part of what people are told."""

    name: str
    produce: Produce
    reason: str
    detail: str


ROWS = [
    Row(
        name="SIGTERM to the flow",
        produce=alone(notified, signal.SIGTERM),
        reason="preempted",
        detail="SIGTERM announced the end of this machine",
    ),
    Row(
        name="Slurm's SIGUSR1 to the flow",
        produce=alone(notified, signal.SIGUSR1),
        reason="preempted",
        detail="the scheduler announced with SIGUSR1",
    ),
    Row(
        name="SIGTERM and too little grace",
        produce=alone(notified_with_too_little_grace),
        reason="preempted",
        detail="the grace period was too short",
    ),
    Row(
        name="SIGTERM before the trainer listens",
        produce=alone(sent, signal.SIGTERM),
        reason="preempted",
        detail="SIGTERM before it could stop cleanly",
    ),
    Row(
        name="exit code of a preemption",
        produce=alone(ended_by_itself, "raise SystemExit(75)"),
        reason="preempted",
        detail="exit code of a preemption",
    ),
    Row(
        name="evicted by Kubernetes",
        produce=alone(ended_by_kubernetes, "Evicted"),
        reason="preempted",
        detail="Kubernetes ended the container: Evicted",
    ),
    Row(
        name="bare SIGKILL",
        produce=alone(sent, signal.SIGKILL),
        reason="lost",
        detail="killed by SIGKILL and left no other evidence",
    ),
    Row(name="bare 137 of a shell", produce=alone(killed_in_a_shell), reason="lost", detail="killed by SIGKILL"),
    Row(
        name="SIGKILL with memory to spare",
        produce=alone(killed_at, 0.5),
        reason="lost",
        detail="left no other evidence; it used up to",
    ),
    Row(name="parent gone", produce=scene("orphaned"), reason="lost", detail="found that its parent had died"),
    Row(name="nothing known", produce=lambda stage: Evidence(), reason="lost", detail="vanished"),
    Row(
        name="killed by the kernel for memory",
        produce=alone(killed_by_the_kernel),
        reason="oom",
        detail="the kernel killed 1 process(es) of this control group for memory",
    ),
    Row(
        name="SIGKILL at the memory limit",
        produce=alone(killed_at, 0.99),
        reason="oom",
        detail="killed by SIGKILL; it used up to",
    ),
    Row(
        name="CPU allocator",
        produce=scene("cpu-allocator"),
        reason="oom",
        detail="DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes",
    ),
    Row(name="MemoryError", produce=scene("python-allocator"), reason="oom", detail="MemoryError"),
    Row(name="numpy's allocator", produce=scene("array-allocator"), reason="oom", detail="Unable to allocate 8.00 GiB"),
    Row(
        name="abort of a C++ allocator",
        produce=alone(ended_by_itself, BAD_ALLOC),
        reason="oom",
        detail="killed by SIGABRT:   what():  std::bad_alloc",
    ),
    Row(
        name="OOMKilled by Kubernetes",
        produce=alone(ended_by_kubernetes, "OOMKilled"),
        reason="oom",
        detail="Kubernetes ended the container: OOMKilled",
    ),
    Row(name="flipped byte in a shard", produce=scene("flipped-byte"), reason="bad-data", detail="sha256 is"),
    Row(
        name="shard of another tokenizer",
        produce=scene("foreign-shard"),
        reason="bad-data",
        detail="cairn.tokenizer_sha256 is",
    ),
    Row(
        name="flipped byte after verification",
        produce=scene("flipped-byte-after-verification"),
        reason="bad-data",
        detail="window 2: token id 276 is outside the vocabulary of 61",
    ),
    Row(
        name="not a number from two samples",
        produce=scene("poisoned-batch"),
        reason="bad-data",
        detail="in 2 window(s) of its batch and in no other",
    ),
    Row(
        name="not a number from every sample",
        produce=scene("broken-weights"),
        reason="diverged",
        detail="loss is nan",
    ),
    Row(
        name="loss far above its course",
        produce=scene("exploded-loss"),
        reason="diverged",
        detail="since step 65",
    ),
    Row(name="closed port", produce=scene("closed-port"), reason="storage", detail="Could not connect to the endpoint"),
    Row(
        name="store is no folder",
        produce=scene("store-is-no-folder"),
        reason="storage",
        detail="a file stands where the store's folder should be",
    ),
    Row(name="store's disk full", produce=scene("full-disk"), reason="storage", detail="No space left on device"),
    Row(name="spool's disk full", produce=scene("full-spool"), reason="storage", detail="No space left on device"),
    Row(
        name="folder without permission",
        produce=scene("no-permission"),
        reason="storage",
        detail="Permission denied",
    ),
    Row(name="checkpoint damaged", produce=scene("damaged-checkpoint"), reason="storage", detail="sha256 is"),
    Row(name="checkpoint gone", produce=scene("missing-checkpoint"), reason="storage", detail="manifest.json: missing"),
    Row(name="disk that keeps nothing", produce=scene("not-durable"), reason="storage", detail="is visible, but"),
    Row(name="data snapshot gone", produce=scene("missing-data"), reason="bad-data", detail="no such data snapshot"),
    Row(name="log out of the parent's reach", produce=alone(store_out_of_reach), reason="storage", detail="store"),
    Row(name="hang", produce=alone(silent), reason="hung", detail="its own steps allowed"),
    Row(
        name="no other machine",
        produce=alone(without_machines),
        reason="too-few-machines",
        detail="1 of 3 machines were here",
    ),
    Row(name="zombie", produce=alone(fenced), reason="fenced", detail="attempt 1 is fenced by attempt 2"),
    Row(
        name="Ctrl-C",
        produce=alone(notified, signal.SIGINT),
        reason="cancelled",
        detail="a person interrupted it",
    ),
    Row(
        name="cancelled in Prefect",
        produce=lambda stage: replace(notified(signal.SIGTERM, stage.folder), cancelling=True),
        reason="cancelled",
        detail="a person cancelled it in Prefect",
    ),
    Row(
        name="missing module",
        produce=scene("missing-module"),
        reason="error",
        detail="ModuleNotFoundError: No module named 'no_such_module'",
    ),
    Row(
        name="missing module before the trainer can speak",
        produce=alone(ended_by_itself, "import no_such_module"),
        reason="error",
        detail="exited with 1: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    Row(name="missing name", produce=scene("missing-name"), reason="error", detail="cannot import name 'no_such_name'"),
    Row(
        name="null pointer",
        produce=alone(ended_by_itself, NULL_POINTER),
        reason="error",
        detail="killed by SIGSEGV: nothing on stderr",
    ),
    Row(name="sent SIGSEGV", produce=alone(sent, signal.SIGSEGV), reason="error", detail="killed by SIGSEGV"),
    Row(
        name="null pointer beside somebody the kernel killed",
        produce=alone(beside_somebody_the_kernel_killed),
        reason="error",
        detail="killed by SIGSEGV",
    ),
    Row(
        name="left without a word",
        produce=alone(ended_by_itself, "pass"),
        reason="error",
        detail="exited with 0: nothing on stderr",
    ),
]


def case(row: Row) -> object:
    return pytest.param(row, id=f"{row.name} → {row.reason}")


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


@pytest.mark.parametrize("row", [*map(case, ROWS)])
def test_a_real_end_gets_its_reason(row: Row, stage: Stage) -> None:
    failure = classify(row.produce(stage))
    assert failure.reason == row.reason, failure
    assert row.detail in failure.detail


@pytest.mark.gpu
def test_the_allocator_of_cuda_gets_its_reason_too(tmp_path: Path) -> None:
    if device_under_test().type != "cuda":
        pytest.skip("says something of CUDA alone")
    failure = classify(on_cuda(Stage(played={}, folder=tmp_path)))
    assert failure.reason == TerminationReason.OOM and "CUDA out of memory" in failure.detail


def test_every_reason_has_a_real_end() -> None:
    no_failures = {TerminationReason.COMPLETED, TerminationReason.PAUSED}  # tests/wiring pauses real sets of runs
    assert {row.reason for row in ROWS} == set(TerminationReason) - no_failures


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
