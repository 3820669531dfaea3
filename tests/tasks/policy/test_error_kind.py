"""The kind of an error: told from its type, sent as a field, and a row for each in what follows."""

import errno
import os
from dataclasses import replace

import pytest
from torch.distributed import DistNetworkError

import cairn.storage.errors
from cairn.model.errors import BadBatch, InvalidInput, LossExploded, NonFiniteLoss, TokenOutOfRange
from cairn.storage.errors import (
    AppendUnknown,
    Fenced,
    IntegrityError,
    NotDurable,
    ObjectDamaged,
    ObjectMissing,
    SnapshotDamaged,
    StorageError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    WriterTooOld,
)
from cairn.storage.logs.run_log import fold
from cairn.tasks.configuration.settings import BudgetsConfig
from cairn.tasks.policy.attempt_sizes import AttemptSizes
from cairn.tasks.policy.budgets import FailureImpact, decide
from cairn.tasks.policy.failures import ErrorKind, Evidence, ExceptionReport, classify, kind_of
from cairn.tasks.policy.termination import EXIT_CODES, flow_outcome
from cairn.tasks.trainer.trainer_channel import exit_on_error
from tests.entries import ended, started
from tests.storage.builders import committed, entry, opened
from tests.tasks.trainer_in_process import ParentEnd

KINDS: list[tuple[BaseException, str]] = [
    (StoreRefused("AccessDenied"), "refused"),
    (StoreFull("No space left"), "full"),
    (StoreUnavailable("503"), "unavailable"),
    (AppendUnknown("not settled"), "unavailable"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "unavailable"),
    (NotDurable("fsync"), "not-durable"),
    (ObjectMissing("runs/a"), "missing"),
    (IntegrityError("data/ in its message changes nothing"), "damaged"),
    (ObjectDamaged("runs/a", expected="x", found="y"), "damaged"),
    (SnapshotDamaged("data/a"), "bad-data"),
    (BadBatch(step=1, windows=(1,), why="nan"), "bad-data"),
    (TokenOutOfRange(window=1, token=9, vocab_size=8), "bad-data"),
    (NonFiniteLoss(step=1, quantity="loss", value=0.0, windows=(1,)), "diverged"),
    (LossExploded(step=2, spike_step=1, level=2.0, baseline=1.0, windows=(1,)), "diverged"),
    (MemoryError(), "out-of-memory"),
    (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "out-of-memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out-of-memory"),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "device-lost"),
    (RuntimeError("NCCL error: unhandled system error\nncclSystemError: System call failed"), "device-lost"),
    (RuntimeError("NCCL error: invalid usage\nncclInvalidUsage: This usually reflects invalid usage"), "bug"),
    (Fenced("attempt 1 is fenced by attempt 2"), "fenced"),
    (StorageError("opened before a fork"), "bug"),
    (WriterTooOld("update cairn"), "bug"),
    (InvalidInput("no"), "bug"),
    (ValueError("no"), "bug"),
]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=[f"{type(error).__name__}-{kind}" for error, kind in KINDS])
def test_an_errors_type_gives_its_kind(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_a_subclass_has_the_kind_of_its_base() -> None:
    class Throttled(StoreUnavailable):
        pass

    assert kind_of(Throttled("no phrase of it is known")) is ErrorKind.UNAVAILABLE


def test_a_refusal_is_told_from_a_store_that_is_away_whatever_the_message_says() -> None:
    assert kind_of(StoreRefused("out of memory, No space left on device")) is ErrorKind.REFUSED


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StoreRefused("AccessDenied"), ErrorKind.REFUSED),
        (DistNetworkError("the client socket has timed out"), ErrorKind.DEVICE_LOST),  # between ranks: no bug
    ],
)
def test_the_kind_crosses_the_channel(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: ErrorKind) -> None:
    parent = ParentEnd()
    monkeypatch.setattr(os, "_exit", lambda code: None)
    exit_on_error(parent, error)  # type: ignore[arg-type]
    assert parent.last(ExceptionReport).kind is kind


# kind → reason, then action and the command's exit code (None: goes on) at the first and the second time at one step.
ROWS = {
    ErrorKind.REFUSED: ("storage", "stop", 75, "stop", 4),
    ErrorKind.NOT_DURABLE: ("storage", "stop", 75, "stop", 4),
    ErrorKind.FULL: ("storage", "stop", 75, "stop", 75),  # once room is made, the same command continues
    ErrorKind.UNAVAILABLE: ("storage", "resume", None, "resume", None),
    ErrorKind.MISSING: ("storage", "resume", None, "stop", 4),
    ErrorKind.DAMAGED: ("storage", "resume", None, "stop", 4),
    ErrorKind.BAD_DATA: ("bad-data", "stop", 4, "stop", 4),  # a resume needs a remedy
    ErrorKind.DIVERGED: ("diverged", "stop", 4, "stop", 4),
    ErrorKind.OUT_OF_MEMORY: ("oom", "resume", None, "stop", 4),
    ErrorKind.DEVICE_LOST: ("lost", "resume", None, "resume", None),
    ErrorKind.FENCED: ("fenced", "stop", 7, "stop", 7),
    ErrorKind.BUG: ("error", "stop", 1, "stop", 1),
}


def follows(evidence: Evidence, *, times: int) -> tuple[str, str, int | None]:
    """Return reason, action and exit code of a run that ends `times` times at step 7 like this."""
    state = fold([entry(opened()), entry(started(1)), entry(committed(5, 1), attempt=1)])
    failure = classify(evidence)
    for number in range(1, times + 1):
        impact = FailureImpact(last_step=7, sizes=AttemptSizes(micro_batch=1, activation_checkpointing=True))
        if number > 1:
            state = fold([entry(started(number))], state)
        decision = decide(BudgetsConfig(), state, failure, impact)
        receipt = replace(
            ended(number, failure.reason), fingerprint=failure.fingerprint, last_step=7, decision=decision
        )
        state = fold([entry(receipt, attempt=number)], state)
    name = flow_outcome(failure.reason, decision.action, decision.charged)
    return failure.reason, decision.action, None if name is None else EXIT_CODES[name]


def test_every_kind_has_a_row() -> None:
    assert set(ROWS) == set(ErrorKind)


@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("by", ["trainer", "parent"])
def test_what_follows_an_error_of_a_kind(kind: ErrorKind, by: str) -> None:
    report = ExceptionReport(kind=kind, exception="E", message="why", traceback=())
    evidence = Evidence(exit_code=1, last_words=report)
    if by == "parent":
        evidence = Evidence(store_error="why", store_error_kind=kind)
    reason, *expected = ROWS[kind]
    found = [item for times in (1, 2) for item in follows(evidence, times=times)[1:]]
    assert (follows(evidence, times=1)[0], found) == (reason, expected)


@pytest.mark.parametrize("kind", [ErrorKind.REFUSED, ErrorKind.NOT_DURABLE])
def test_what_only_a_person_can_mend_says_that_the_same_command_continues(kind: ErrorKind) -> None:
    state = fold([entry(opened()), entry(started(1))])
    failure = classify(Evidence(store_error="s3://cairn/runs/r: AccessDenied", store_error_kind=kind))
    sizes = AttemptSizes(micro_batch=1, activation_checkpointing=False)
    decision = decide(BudgetsConfig(), state, failure, FailureImpact(last_step=7, sizes=sizes))
    assert "the same command continues" in decision.reason
    assert "s3://cairn/runs/r" in failure.detail


def test_no_error_of_the_store_is_forgotten() -> None:
    never_in_an_attempt = {"StoreUnsound", "NothingReadable", "StorageError"}
    known = {type(error).__name__ for error, _ in KINDS}
    every = vars(cairn.storage.errors).items()
    named = {name for name, item in every if isinstance(item, type) and issubclass(item, StorageError)}
    assert named - known == never_in_an_attempt - {"StorageError"}
