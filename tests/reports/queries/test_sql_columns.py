"""Every column of the SQL tables shows its own field: the expected value of each is read from the entries by hand."""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from cairn.reports.queries.alias_history import list_alias_decisions
from cairn.reports.queries.run_tables import ROWS, make_log_rows, make_step_rows, promotion_row
from cairn.storage.logs.log_entry import Arithmetic, CheckpointReference, DevicePeak, ForkOrigin
from cairn.storage.logs.registry import ModelDecision, RolledBack, Withdrawn
from cairn.storage.logs.run_entries import CurveVerdict, EvaluationFailed, RunFinished
from cairn.storage.logs.run_log import fold
from cairn.storage.logs.run_members import MembersChanged
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import StepRecord
from tests.entries import (
    NOON,
    decided,
    ended,
    evaluated,
    noted,
    placement,
    promoted,
    refused,
    registry_of,
    spoiled,
    started,
)
from tests.fabricated_run import configuration
from tests.storage.builders import committed, entry, opened

CONFIG = configuration(("training.seed=77", "model.dropout=0.25", "training.lr=0.0125", "model.n_layer=5")).frozen()
BEGINNING = CheckpointReference(step=15, attempt=4, prefix="q", manifest_sha256="b")
OPENED = replace(
    opened(),
    config=CONFIG,
    initial_weights_sha256="e" * 64,
    forked_from=ForkOrigin(run_id="parent", checkpoint=BEGINNING, state_sha256="s15"),
)
REFERENCE = CheckpointReference(step=20, attempt=1, prefix="p", manifest_sha256=f"{20:064x}")
NATIVE = Arithmetic(digest="a", name="native", processor="p", instructions="i", libraries="l", flags="f")
FIRST = ended(1, decision=decided(charged="lost"), arithmetic=replace(NATIVE, digest="b", name="wide"))
SECOND = ended(
    2,
    "preempted",
    last_step=41,
    tokens=19,
    gpu_seconds=9.0,
    useful_gpu_seconds=8.5,
    wasted_gpu_seconds=0.25,
    peak=DevicePeak(flops=5e14, source="data sheet"),
    arithmetic=NATIVE,
    starting_seconds=3.5,
    last_seen_at=None,
    evidence={"injected": ["preempt@41"]},
    decision=decided(
        action="finish",
        reason="then",
        charged="preempted",
        left={"total": 6},
        delay_seconds=17.5,
        micro_batch=2,
        activation_checkpointing=True,
        changed="micro-batch 4→2",
    ),
)
AGAIN = started(
    2,
    placement=replace(
        placement(host="there", pid=13, device="cuda", world_size=6), device_name="a GPU", nodes=8, cores=9, threads=10
    ),
    resumed_from=REFERENCE,
    config_sha256="c2",
    code_version="2",
    versions={"python": "3.12", "torch": "2.14"},
    activation_checkpointing=True,
)
VERDICT = CurveVerdict(kind="healthy", why="it falls", numbers={"train_loss": 2.25})
MEASURED = replace(evaluated(40, 2.5), verdict=VERDICT, boundary="landlock")
FAILED = EvaluationFailed(
    step=20,
    manifest_sha256=f"{20:064x}",
    suite="words",
    suite_sha256="s2",
    data_snapshot="d2",
    detail="it fell over",
    started_at=NOON + timedelta(seconds=90),
    seconds=8.25,
)
QUARANTINED = spoiled(3, 5, 8)
LOST = MembersChanged(
    attempt=1,
    step=17,
    lost=(2,),
    remaining=(0, 1, 3, 4),
    detail="rank 2 lost",
    charged="lost",
    joined=(4,),
    hosts=("n7",),
)
FINISHED = RunFinished(
    attempt=2, step=40, manifest_sha256=f"{40:064x}", state_sha256="s40", stopped="overfit", rule="patience"
)
PROMOTED = promoted(
    alias="best",
    run_id="r1",
    step=40,
    manifest_sha256="m40",
    metrics={"val_loss": 2.5, "perplexity": 12.0},
    by="run r1",
    previous="m0",
    verdict="healthy",
)
REFUSED = refused(
    alias="best", run_id="r2", step=60, manifest_sha256="m60", why="a try", suite_sha256="s2", metrics={"val_loss": 3.5}
)
BACK = RolledBack(alias="best", manifest_sha256="m40", by="you", why="it stutters", left_manifest_sha256="m40")
STEP = StepRecord(
    step=21,
    attempt=2,
    train_loss=2.75,
    lr=0.011,
    grad_norm=0.6,
    tokens_per_second=123.0,
    mfu=0.07,
    memory_bytes=4096,
    seconds=0.13,
    probe_loss=2.875,
    sample="The end",
    at=NOON + timedelta(seconds=77),
    tokens=672,
    epoch=0.75,
    data_seconds=0.02,
    loss_scale=1024.0,
    weights_digest="00c0ffee00c0ffee",
    world_size=2,
    rss_bytes=8192,
    disk_free_bytes=16384,
)


COMMITTED = replace(committed(40, 2), bytes=19, tokens=14, gpu_seconds=2.75, state_sha256="s40")


def at(seq: int) -> Any:
    return NOON + timedelta(seconds=seq)


@pytest.fixture(scope="module")
def state() -> RunState:
    """A finished run of two attempts; what only an attempt may say is said by the one that was open."""
    bodies = [
        (OPENED, None),
        (started(1), None),
        (committed(20, 1), 1),
        (QUARANTINED, 1),
        (FIRST, 1),
        (AGAIN, None),
        (COMMITTED, 2),
        (MEASURED, None),
        (FAILED, None),
        (FINISHED, 2),
        (SECOND, 2),
        (committed(60, 1), 1),
        (noted(), None),
    ]
    entries = [entry(body, attempt=attempt, seq=seq) for seq, (body, attempt) in enumerate(bodies)]
    entries[9] = replace(entries[9], writer=replace(entries[9].writer, flow_run_id="flow 2"))
    return fold(entries)


def of(record: object, names: str, prefix: str = "") -> dict[str, Any]:
    """Return these fields of a record by the columns that show them: the prefix, and the field's name."""
    return {f"{prefix}{name}": getattr(record, name) for name in names.split()}


RUN = {"run_id": "r1", "model_family": "tiny"}
PLACEMENT = (
    "host pid device device_name world_size nodes nodes_wanted hosts continued_by cores threads boot_id pid_namespace"
    " start_ticks"
)
DECISION = "action reason charged left delay_seconds micro_batch activation_checkpointing changed"
ENDED = "detail fingerprint last_step tokens gpu_seconds useful_gpu_seconds wasted_gpu_seconds starting_seconds"
STARTED = (
    "config_sha256 code_version versions gathering_seconds micro_batch activation_checkpointing quarantined_samples"
)
EXPECTED: dict[str, dict[str, Any]] = {
    "training_attempts": {
        **RUN,
        **of(AGAIN, f"attempt {STARTED} changed config"),
        **of(AGAIN.placement, PLACEMENT, "placement_"),
        **of(SECOND, ENDED),
        **of(SECOND.peak, "flops source", "peak_"),
        **of(NATIVE, "digest name processor instructions libraries flags", "arithmetic_"),
        **of(SECOND.decision, DECISION, "decision_"),
        "started_at": at(5),
        "ended_at": at(10),
        "termination_reason": "preempted",
        "data_snapshot": "d",
        "initial_weights_sha256": "e" * 64,
        "failed_host": None,
        "flow_run_id": "flow 2",
        "resumed_from_step": 20,
        "resumed_from_manifest": f"{20:064x}",
        "first_step": 20,
        "last_committed_step": 40,
        "total_steps": 100,
        "waiting_seconds": 3.0,  # the attempt before was seen at 2 and ended at 4
        "arithmetic_moved": "bits may differ from here: arithmetic a, not b as before (wide → native)",
        "injected": ("preempt@41",),
        "made_progress": True,
    },
    "checkpoints": {
        **RUN,
        **of(COMMITTED, "attempt step prefix manifest_sha256 state_sha256 bytes tokens gpu_seconds"),
        "state": "committed",
        "committed_at": at(6),
        "detail": "",
    },
    "evaluations": {
        **RUN,
        **of(FAILED, "step manifest_sha256 suite suite_sha256 data_snapshot detail started_at seconds"),
        **dict.fromkeys(("val_loss", "perplexity", "bits_per_byte", "evaluator_version", "boundary", "pin_id")),
        **dict.fromkeys(("verdict_kind", "verdict_why", "verdict_numbers", "verdict_cures")),
        "attempt": 1,
        "status": "failed",
        "metrics": {},
        "samples": (),
    },
    "member_changes": {**RUN, **of(LOST, "attempt step lost remaining detail charged joined hosts")},
    "notes": {**RUN, "noted_at": at(12), "noted_by": "me@here", "text": "the rate was too high"},
    "runs": {
        **RUN,
        **of(OPENED, "total_steps data_snapshot config_sha256 code_version config"),
        **dict.fromkeys(("train_loss", "tokens_per_second", "seconds_left", "deleted_at")),
        "state": "finished",
        "step": 40,
        "newest_committed_step": 40,
        "attempts": 2,
        "tokens": 7 + 19,
        "gpu_seconds": 2.0 + 9.0,
        "useful_gpu_seconds": 1.5 + 8.5,
        "wasted_gpu_seconds": 0.5 + 0.25,
        "waiting_seconds": 1.0 + 3.0,
        "starting_seconds": 2.25 + 3.5,
        "injected_attempts": 1,
        "opened_at": at(0),
        "finished_at": at(6),
        "last_seen_at": at(10),
        "stopped": "overfit",
        "state_sha256": "s40",
        "val_loss": 2.5,
        "quarantined_windows": 3,
        "refused_entries": 1,
        "lr": 0.0125,
        "global_batch": 2,
        "forked_from_run": "parent",
        "forked_from_step": 15,
        "seed": 77,
        "precision": "fp32",
        "n_layer": 5,
        "n_head": 1,
        "n_embd": 8,
        "block_size": 8,
        "dropout": 0.25,
        "tokenizer": "bytes",
        "detail": "stopped early at step 40: overfit (early_stop.patience)",
        "tags": ("baseline", "old"),
    },
}
"""The newest row of each table by column, from the entries above."""


def shown(row: Any) -> dict[str, Any]:
    """Return a row by column, its configuration as a document."""
    values = {name: getattr(row, name) for name in row.__slots__}
    return values | ({"config": json.loads(values["config"])} if "config" in values else {})


@pytest.mark.parametrize("table", ["training_attempts", "checkpoints", "evaluations", "notes", "runs"])
def test_every_column_that_follows_from_the_log_shows_its_own_field(state: RunState, table: str) -> None:
    newest = make_log_rows("r1", state, "finished")[table][-1]
    assert shown(newest) == EXPECTED[table]
    assert set(EXPECTED[table]) == set(ROWS[table].__slots__)


@pytest.fixture(scope="module")
def shrunk() -> RunState:
    """A run whose open attempt lost a rank, and a late word of an attempt that is over."""
    bodies = [(OPENED, None), (started(1), None), (LOST, 1), (replace(LOST, attempt=2), 1)]
    return fold([entry(body, attempt=attempt, seq=seq) for seq, (body, attempt) in enumerate(bodies)])


def test_a_lost_rank_is_a_row_and_is_charged_once(shrunk: RunState) -> None:
    (row,) = make_log_rows("r1", shrunk, "training")["member_changes"]
    assert shown(row) == EXPECTED["member_changes"]
    assert set(EXPECTED["member_changes"]) == set(ROWS["member_changes"].__slots__)
    assert shrunk.charges["lost"].since_progress == (1,) and shrunk.charges["lost"].total == 1
    assert [refused.kind for refused in shrunk.refused] == ["members-changed"]


def test_a_recorded_evaluation_shows_its_metrics_samples_and_verdict(state: RunState) -> None:
    row = make_log_rows("r1", state, "finished")["evaluations"][0]
    assert (row.val_loss, row.perplexity, row.bits_per_byte, row.seconds) == (2.5, 31.5, 1.75, 6.5)
    assert (row.verdict_kind, row.verdict_why, row.status, row.samples) == ("healthy", "it falls", "recorded", ("a",))
    assert (row.attempt, row.evaluator_version, row.metrics, row.detail) == (2, "2", MEASURED.metrics, None)
    assert row.boundary == "landlock"


def test_a_step_shows_its_record(state: RunState) -> None:
    (row,) = make_step_rows("r1", state, [STEP])
    assert shown(row) == of(STEP, " ".join(STEP.__slots__)) | {"run_id": "r1", "model_family": "tiny", "replays": 0}


def promotion_rows(*decisions: tuple[datetime, ModelDecision]) -> list[Any]:
    """Return the rows of these decisions, oldest first."""
    return [promotion_row(item) for item in reversed(list_alias_decisions("best", registry_of(*decisions)))]


def test_a_withdrawal_is_a_row_of_its_own_and_moves_no_alias() -> None:
    withdrawn = Withdrawn(alias="best", run_id="r0", by="me", why="not needed")
    promoted, row = promotion_rows((at(1), PROMOTED), (at(2), withdrawn))
    assert (promoted.current, row.current) == (True, False)
    assert (row.kind, row.run_id, row.by, row.why, row.step) == ("withdrawn", "r0", "me", "not needed", None)


def test_every_decision_on_an_alias_shows_its_own_fields() -> None:
    promoted, refused, back = map(shown, promotion_rows((at(1), PROMOTED), (at(2), REFUSED), (at(3), BACK)))
    of_promoted = {name: getattr(PROMOTED, name) for name in PROMOTED.__slots__ if name in promoted}
    assert {name: promoted[name] for name in of_promoted} == of_promoted
    assert (promoted["kind"], promoted["decided_at"], promoted["promoted_at"]) == ("promoted", at(1), at(1))
    assert (promoted["val_loss"], promoted["current"], promoted["gate"]) == (2.5, False, None)
    assert [row.current for row in promotion_rows((at(1), PROMOTED), (at(2), REFUSED))] == [True, False]
    of_refused = {name: getattr(REFUSED, name) for name in REFUSED.__slots__ if name in refused}
    assert {name: refused[name] for name in of_refused} == of_refused
    assert (refused["kind"], refused["promoted_at"], refused["val_loss"]) == ("refused", None, 3.5)
    assert (back["kind"], back["by"], back["why"], back["current"]) == ("rolled-back", "you", "it stutters", True)
    assert (back["run_id"], back["step"], back["previous"], back["val_loss"]) == ("r1", 40, "m40", 2.5)
