"""Rows of one run, and what tells versions of them apart."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from cairn.reports.queries import run_tables
from cairn.reports.queries.alias_history import list_alias_decisions
from cairn.reports.queries.run_tables import (
    ROWS,
    columns,
    make_attempt_row,
    make_log_rows,
    make_run_row,
    make_unreadable_row,
    promotion_row,
)
from cairn.storage.logs.registry import RolledBack
from cairn.storage.logs.run_entries import RunFinished
from cairn.storage.logs.run_log import fold
from cairn.storage.logs.run_members import MembersChanged
from cairn.storage.logs.run_state import RunState
from cairn.storage.tables.table_cache import arrow_table
from tests.entries import NOON, ended, evaluated, noted, promoted, registry_of, started, superseded
from tests.storage.builders import committed, entry, opened


def folded(*bodies: Any) -> RunState:
    """Fold bodies; what only an attempt may say is said by attempt 1."""
    kinds = (type(committed(1, 1)), RunFinished)
    return fold([entry(b, attempt=1 if isinstance(b, kinds) else None, seq=n) for n, b in enumerate(bodies)])


FINISHED = RunFinished(attempt=1, step=20, manifest_sha256=f"{20:064x}", state_sha256="s")


@pytest.mark.parametrize("table", ROWS)
def test_an_empty_table_has_the_columns_and_types_of_a_full_one(table: str) -> None:
    assert arrow_table(columns(table), ()).column_names == [column.name for column in columns(table)]
    assert len(arrow_table(columns(table), ())) == 0


def test_rows_become_arrow_without_a_loss() -> None:
    lost = MembersChanged(attempt=1, step=9, lost=(2,), remaining=(0, 1), detail="ß", charged="lost")
    state = folded(opened(), started(1), lost, committed(20, 1), evaluated(20, 1.5), noted(), ended(1, "ß"))
    for table, rows in make_log_rows("r1", state, "stopped").items():
        (shown,), (row,) = arrow_table(columns(table), rows).to_pylist(), rows
        for column in columns(table):
            value = getattr(row, column.name)
            if column.type.startswith("MAP") and value is not None:
                value = sorted(value.items())
            assert shown[column.name] == (list(value) if isinstance(value, tuple) else value)


def test_a_table_of_repeated_configurations_holds_each_once() -> None:
    state = folded(opened(), started(1), ended(1))
    rows = [make_attempt_row("r1", state, record) for record in state.attempts]
    assert pa.types.is_dictionary(arrow_table(columns("training_attempts"), rows * 3)["config"].type)


def test_an_open_attempt_has_no_reason_and_no_decision() -> None:
    state = folded(opened(), started(1), committed(20, 1))
    row = make_attempt_row("r1", state, state.attempts[0])
    assert (row.termination_reason, row.ended_at, row.decision_action, row.decision_left) == (None,) * 4
    assert (row.first_step, row.last_step, row.last_committed_step) == (0, 20, 20)


def test_a_finished_run_says_when_its_last_step_was_committed() -> None:
    state = folded(opened(), started(1), committed(20, 1), FINISHED, ended(1, "completed"))
    row = make_run_row("r1", state, "finished")
    assert (row.finished_at, row.state_sha256, row.attempts) == (state.checkpoints[0].committed_at, "s", 1)


def test_a_superseded_checkpoint_keeps_its_row_and_says_why() -> None:
    gone = committed(10, 1)
    state = folded(opened(), started(1), gone, committed(20, 1), superseded(gone.reference))
    rows = make_log_rows("r1", state, "running")["checkpoints"]
    assert [(row.state, row.detail) for row in rows] == [("superseded", "keep_last"), ("committed", "")]


@pytest.mark.parametrize("config", [{}, {"model": 3}, {"model": {"n_layer": "six"}, "training": {"lr": None}}])
def test_a_configuration_of_another_shape_leaves_its_columns_empty(config: dict[str, Any]) -> None:
    row = make_run_row("r1", folded(replace(opened(), config=config)), "opened")
    assert (row.n_layer, row.lr) == (None, None)


def test_a_run_that_was_never_opened_is_still_a_row() -> None:
    assert make_run_row("r1", folded(started(1)), "running").model_family is None


def test_an_unreadable_run_says_only_why() -> None:
    row = make_unreadable_row("r1", "torn")
    assert (row.run_id, row.state, row.detail, row.attempts) == ("r1", "unreadable", "torn", None)


def test_after_a_roll_back_to_nothing_the_alias_points_nowhere() -> None:
    first = promoted(alias="a", run_id="r1")
    back = RolledBack(alias="a", manifest_sha256=None, by="me", why="worse", left_manifest_sha256="m")
    rows = [promotion_row(item) for item in list_alias_decisions("a", registry_of((NOON, first), (NOON, back)))]
    assert [(row.kind, row.current, row.run_id, row.previous) for row in rows] == [
        ("rolled-back", True, None, "m"),
        ("promoted", False, "r1", None),
    ]


def test_packs_of_other_rows_or_another_fold_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_tables.schema_digest()
    digests = {before}
    for module, name in ((run_tables.fold_cache, "FOLD_VERSION"), (run_tables, "TABLES_VERSION")):
        monkeypatch.setattr(module, name, 99)
        run_tables.schema_digest.cache_clear()
        digests.add(run_tables.schema_digest())
        monkeypatch.undo()
    run_tables.schema_digest.cache_clear()
    assert len(digests) == 3 and run_tables.schema_digest() == before
