"""The identity of an arithmetic: which facts make it, what a move is, and which one a checkpoint was computed with."""

from dataclasses import replace
from pathlib import Path

import pytest

from cairn.storage.logs.log_entry import Arithmetic, CheckpointReference, ForkOrigin
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.machine.arithmetic import arithmetic_before, describe_move, describe_processor
from tests import entries
from tests.storage.builders import RUN, committed, run_log

WIDE = Arithmetic(digest="aaaa", name="native", processor="p", instructions="AVX512", libraries="l", flags="f")
NARROW = replace(WIDE, digest="bbbb", instructions="AVX2")
CPUINFO = """processor	: 0
vendor_id	: {vendor}
cpu family	: 26
model		: {model}
model name	: AMD EPYC
flags		: fpu sse4_1 avx avx2 {flags}

processor	: 1
"""


@pytest.mark.parametrize(("before", "now"), [(None, WIDE), (WIDE, None), (None, None), (WIDE, WIDE)])
def test_an_equal_or_an_unknown_arithmetic_is_no_move(before: Arithmetic | None, now: Arithmetic | None) -> None:
    assert describe_move(before, now) == ""


@pytest.mark.parametrize("field", ["name", "processor", "instructions", "libraries", "flags"])
def test_a_move_names_what_is_another_and_nothing_else(field: str) -> None:
    said = describe_move(WIDE, replace(WIDE, digest="cccc", **{field: "other"}))
    assert said.startswith("bits may differ from here: arithmetic cccc, not aaaa as before (")
    assert said.count(" → ") == 1 and f"{getattr(WIDE, field)} → other" in said


@pytest.mark.parametrize(
    ("changes", "is_other"),
    [
        ({"vendor": "GenuineIntel"}, True),
        ({"model": "17"}, True),
        ({"flags": "avx512f"}, True),
        ({"flags": "amx_bf16"}, True),
        ({"flags": "md_clear"}, False),
        ({"flags": "constant_tsc"}, False),
    ],
)
def test_processors_of_one_name_are_told_apart_by_what_products_are_computed_with(
    tmp_path: Path, changes: dict[str, str], is_other: bool
) -> None:
    usual = {"vendor": "AuthenticAMD", "model": "2", "flags": ""}
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(CPUINFO.format(**usual))
    other.write_text(CPUINFO.format(**{**usual, **changes}))
    assert (describe_processor(one) != describe_processor(other)) is is_other


def append(log: RunLog, body: object, attempt: int | None = None) -> None:
    log.append(lambda state: body, writer=entries.writer(attempt) if attempt else entries.writer())  # type: ignore[arg-type,return-value]


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """Two attempts have committed; the first one's arithmetic is known."""
    log, first, second = run_log(LocalStore(tmp_path)), committed(10, 1), committed(20, 2)
    append(log, entries.opened(RUN))
    append(log, entries.started(1))
    append(log, first, 1)
    append(log, entries.ended(1, arithmetic=WIDE), 1)
    append(log, entries.started(2, resumed_from=first.reference))
    append(log, second, 2)
    return log


def test_a_checkpoint_has_the_arithmetic_of_the_attempt_that_committed_it(log: RunLog) -> None:
    append(log, entries.ended(2, arithmetic=NARROW), 2)
    first, second = (record.committed.reference for record in log.state.checkpoints)
    assert [arithmetic_before(log.state, item) for item in (first, second)] == [WIDE, NARROW]


def test_an_attempt_without_an_account_is_taken_to_have_the_one_before_it(log: RunLog) -> None:
    append(log, entries.ended(2, arithmetic=None), 2)
    assert arithmetic_before(log.state, log.state.resume_reference) == WIDE


def test_a_start_at_step_0_moves_from_nowhere(log: RunLog) -> None:
    assert arithmetic_before(log.state, None) is None


def test_a_fork_begins_with_the_arithmetic_of_its_parent(tmp_path: Path) -> None:
    checkpoint = CheckpointReference(step=10, attempt=3, prefix="runs/p/checkpoints/x", manifest_sha256="m")
    origin = ForkOrigin(run_id="p", checkpoint=checkpoint, state_sha256="s", arithmetic=NARROW)
    log = RunLog(LocalStore(tmp_path), "fork")
    log.refresh()
    append(log, entries.opened("fork", forked_from=origin))
    append(log, entries.started(1, resumed_from=checkpoint))
    append(log, entries.ended(1, arithmetic=WIDE), 1)
    assert arithmetic_before(log.state, checkpoint) == NARROW
