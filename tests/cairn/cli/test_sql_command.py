"""SQL over every run of a store, as a user asks it."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.reports.errors import InvalidQuery
from cairn.reports.queries.evaluations import list_evaluations
from cairn.reports.queries.receipts import read_receipts
from cairn.reports.queries.run_lookup import read_beat, read_checkpoints
from cairn.reports.queries.run_query import answer_query, find_tables
from cairn.reports.queries.run_tables import ROWS
from cairn.storage.logs.log_entry import Writer, encode_entry
from cairn.storage.logs.registry import Registry, RolledBack
from cairn.storage.logs.step_log import step_log_key
from cairn.storage.stores.codec import encode
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from tests.commands import LIST_IMPORTS, Cairn, Ended, run_python
from tests.entries import placement, refused, spoiled
from tests.fabricated_run import FabricatedRun, fabricate, store_bard, write_steps
from tests.storage.builders import newest_entry

CONTRACT = """
    select termination_reason, count(*) as attempts, sum(gpu_seconds) / 3600 as gpu_hours
    from training_attempts
    where model_family = 'gpt2-tiny' and started_at >= now() - interval '7 days'
    group by termination_reason order by gpu_hours desc
"""


def ask(store: ObjectStore, sql: str, work: Path) -> list[dict[str, Any]]:
    with answer_query(store, sql, work=work) as found:
        return [dict(zip([column.name for column in found.columns], row, strict=True)) for row in found.rows]


DRAWN = {"train_loss": 2.0, "sample": "ß", "tokens": lambda step: step * 2 * 8}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_the_query_of_the_contract_runs_as_it_stands(store: LocalStore, cairn: Cairn) -> None:
    run = fabricate(store, "recent", opened_at=datetime.now(UTC) - timedelta(days=1))
    for reason in ("preempted", "preempted", "oom"):
        run.start()
        run.end(reason, action="resume", charged=reason)
    run.start()
    old = fabricate(store, "old")
    old.start()
    old.end("lost", action="resume")

    ended = cairn("sql", CONTRACT, "--json")

    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out) == [
        {"termination_reason": "preempted", "attempts": 2, "gpu_hours": 4 / 3600},
        {"termination_reason": "oom", "attempts": 1, "gpu_hours": 2 / 3600},
        {"termination_reason": None, "attempts": 1, "gpu_hours": 0.0},
    ]


def test_receipts_are_those_of_the_attempts_verb_field_by_field(bard: FabricatedRun, work: Path) -> None:
    shown = list(msgspec.to_builtins(read_receipts(bard.log, read_beat(bard.log))))
    names = ", ".join(shown[0])
    asked = ask(bard.log.store, f"select {names} from training_attempts order by attempt", work)
    assert msgspec.json.decode(msgspec.json.encode(asked)) == msgspec.json.decode(msgspec.json.encode(shown))


def test_nested_fields_are_columns_too(bard: FabricatedRun, work: Path) -> None:
    sql = """select placement.host = placement_host and decision.action = decision_action
        and decision_left = map {'retries': 3} as same from training_attempts where attempt = 1"""
    assert ask(bard.log.store, sql, work) == [{"same": True}]


def test_checkpoints_are_those_of_the_verb_but_for_the_ones_being_written(bard: FabricatedRun, work: Path) -> None:
    shown = [msgspec.to_builtins(view) for view in read_checkpoints(bard.log) if view.state != "writing"]
    names = ", ".join(shown[0])
    assert msgspec.to_builtins(ask(bard.log.store, f"select {names} from checkpoints order by step", work)) == shown


def test_evaluations_are_those_of_the_verb(bard: FabricatedRun, work: Path) -> None:
    shown = json.loads(encode(list_evaluations(bard.log.state)))
    asked = ask(bard.log.store, f"select {', '.join(shown[0])} from evaluations order by started_at", work)
    assert json.loads(encode(asked)) == shown
    losses = ask(bard.log.store, "select step, val_loss, metrics['val_loss'] as same, status from evaluations", work)
    assert [(row["val_loss"], row["same"], row["status"]) for row in losses] == [
        (3.0, 3.0, "recorded"),
        (2.0, 2.0, "recorded"),
        (None, None, "failed"),
    ]


def test_every_decision_on_an_alias_is_a_row(bard: FabricatedRun, work: Path) -> None:
    store = bard.log.store
    first, second = (record.committed.reference for record in bard.log.state.checkpoints[:2])
    Registry(store, "champion").append(lambda state: refused(gate="min_improvement"))
    back = RolledBack(alias="champion", manifest_sha256=first.manifest_sha256, by="me", why="it stutters")
    Registry(store, "champion").append(lambda state: back)

    rows = ask(store, 'select kind, step, model_family, current, "by", gate from promotions order by decided_at', work)

    assert [(row["kind"], row["step"], row["current"]) for row in rows] == [
        ("promoted", 10, False),
        ("promoted", 20, False),
        ("refused", 30, False),
        ("rolled-back", 10, True),
    ]
    assert {row["model_family"] for row in rows} == {"gpt2-tiny"} and rows[2]["gate"] == "min_improvement"
    assert second.step == 20


def test_the_curve_has_every_step_once_and_says_what_was_repeated(bard: FabricatedRun, work: Path) -> None:
    write_steps(bard.log, 1, range(1, 28), **DRAWN)
    write_steps(bard.log, 2, range(21, 34), **DRAWN)
    torn = step_log_key(bard.log.prefix, 2)
    bard.log.store.write(torn, bard.log.store.read(torn) + b'{"torn')
    rows = ask(bard.log.store, "select step, attempt, replays, tokens, sample from steps order by step", work)
    assert [row["step"] for row in rows] == list(range(1, 34))
    assert [row["attempt"] for row in rows] == [1] * 20 + [2] * 13
    assert [row["replays"] for row in rows] == [0] * 20 + [1] * 7 + [0] * 6
    assert rows[-1]["tokens"] == 33 * 2 * 8 and rows[0]["sample"] == "ß"


def test_a_run_is_one_row_with_its_configuration(bard: FabricatedRun, work: Path) -> None:
    sql = """select run_id, tokens, gpu_seconds, val_loss, n_embd,
        config.training.steps::int as steps, config->>'$.model.n_head' as n_head from runs"""
    (row,) = ask(bard.log.store, sql, work)
    assert tuple(row.values()) == ("bard", 16, 2.75, 2.0, 8, 40, "1")


def test_an_empty_store_has_empty_tables_of_the_right_types(store: LocalStore, work: Path) -> None:
    for table in ROWS:
        assert ask(store, f"select * from {table}", work) == []
    typed = "select typeof(any_value(started_at)) as type from training_attempts"
    assert ask(store, typed, work) == [{"type": "TIMESTAMP WITH TIME ZONE"}]


@pytest.mark.unsound_log
def test_a_run_that_cannot_be_believed_is_said_and_leaves_the_others(
    bard: FabricatedRun, fresh: FabricatedRun, cairn: Cairn, tmp_path: Path
) -> None:
    entry = tmp_path / "store" / "runs" / "bard" / "log" / "9999999997.json"
    entry.write_text(entry.read_text().replace("here", "there"))
    ended = cairn("sql", "select run_id, state, detail is null as sound from runs order by all", "--json")
    assert ended.code == 0 and "left out: runs/bard" in ended.err
    assert json.loads(ended.out) == [
        {"run_id": "bard", "sound": False, "state": "unreadable"},
        {"run_id": "fresh", "sound": True, "state": "opened"},
    ]


@pytest.mark.unsound_log
def test_refused_entries_count_and_change_nothing(fresh: FabricatedRun, work: Path) -> None:
    fresh.start()
    fresh.end("lost", action="resume")
    forged = fresh.log._log.append(spoiled(1), after=fresh.log.head, writer=Writer(host="zombie", pid=1, attempt=1))
    assert forged is not None
    sql = "select refused_entries, quarantined_windows, attempts from runs"
    assert ask(fresh.log.store, sql, work) == [{"refused_entries": 1, "quarantined_windows": 0, "attempts": 1}]


def test_machines_that_failed_are_counted_over_all_their_attempts(fresh: FabricatedRun, work: Path) -> None:
    for hosts, reason, lost_host in (
        (("n0", "n1"), "lost", "n1"),
        (("n0", "n1"), "lost", ""),
        (("n0", "n2"), "oom", ""),
    ):
        fresh.start(placement=placement(host="n0", hosts=hosts))
        fresh.end(reason, action="resume", evidence={"lost_host": lost_host})
    sql = "select host, runs, attempts, failed, last_failed_at is null as never from hosts order by host"
    assert [tuple(row.values()) for row in ask(fresh.log.store, sql, work)] == [
        ("n0", 1, 3, 1, False),
        ("n1", 1, 2, 1, False),
        ("n2", 1, 1, 0, True),
    ]


def test_entries_of_a_newer_kind_are_passed_over(fresh: FabricatedRun, work: Path) -> None:
    fresh.start()
    store, newest = fresh.log.store, newest_entry(fresh.log._log)
    assert newest is not None
    later = json.loads(store.read("runs/fresh/log/9999999998.json"))
    later |= {"kind": "dream-recorded", "seq": 2, "prev": newest.sha256, "write_id": "new", "checksum": None}
    assert store.create("runs/fresh/log/9999999997.json", encode_entry(later))
    assert ask(store, "select count(*) as n from training_attempts", work) == [{"n": 1}]


def test_text_of_any_language_comes_back_as_it_was(store: LocalStore, work: Path) -> None:
    run = fabricate(store, "weltall")
    run.start()
    run.end('größe ☃ 🪨\t"x"', action="resume")
    assert ask(store, "select termination_reason as r from training_attempts", work) == [{"r": 'größe ☃ 🪨\t"x"'}]


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('/etc/passwd')",
        "select * from '/etc/passwd'",
        "copy runs to 'stolen.csv'",
        "attach 'other.db'",
        "install httpfs",
        "select * from read_csv('http://127.0.0.1/x')",
        "select * from glob('/*')",
        "set enable_external_access = true",
        "reset lock_configuration",
    ],
)
def test_a_query_reaches_nothing_but_the_tables(bard: FabricatedRun, work: Path, sql: str) -> None:
    with pytest.raises(InvalidQuery):
        ask(bard.log.store, f"select run_id from runs; {sql}", work)


def test_without_a_query_the_columns_are_listed(cairn: Cairn) -> None:
    listed = json.loads(cairn("sql", "--json").out)
    assert {"table": "runs", "column": "run_id", "type": "VARCHAR"} in listed
    assert {item["table"] for item in listed} == set(ROWS)
    assert "training_attempts" in cairn("sql").out


def test_json_has_null_for_what_is_no_number_and_values_of_every_type(cairn: Cairn) -> None:
    sql = """select 'nan'::double as a, null as b, map {'x': 1.5} as c, 170141183460469231731687303715884105727 as d,
        timestamptz '2026-01-01 00:00:00+00' as e, 1.10 as f, '{"y": [1]}'::json as g, [true] as h, 1 as i, 2 as i"""
    assert json.loads(cairn("sql", sql, "--json").out) == [
        {
            "a": None,
            "b": None,
            "c": {"x": 1.5},
            "d": 1.7014118346046923e38,
            "e": "2026-01-01T00:00:00Z",
            "f": 1.1,
            "g": {"y": [1]},
            "h": [True],
            "i": 1,
            "i_2": 2,
        }
    ]


@pytest.fixture(scope="module")
def asked_from_packs(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A query on standard input in a process of its own, whose packs are there; it says what it imported on stderr."""
    folder = tmp_path_factory.mktemp("packs")
    store_bard(store := LocalStore(folder / "store"))
    ask(store, "select * from runs", folder / "cache")
    query = "select count(run_id) as n from runs"
    return run_python(("-c", LIST_IMPORTS, "sql", "-", "--json"), folder, {"PATH": ""}, stdin=query)


def test_a_query_can_come_from_standard_input(asked_from_packs: Ended) -> None:
    assert json.loads(asked_from_packs.out) == [{"n": 1}], asked_from_packs.err


def test_an_answer_from_packs_imports_neither_torch_nor_the_orchestrator_nor_arrow(asked_from_packs: Ended) -> None:
    imported = set(asked_from_packs.err.split())
    assert "duckdb" in imported and not {"torch", "prefect", "fsspec", "pyarrow"} & imported


def test_only_tables_that_are_named_are_read() -> None:
    assert find_tables("select total_steps from RUNS") == {"runs"}
    assert find_tables('select * from "Steps"') == {"steps"}
    assert find_tables("from promotions") == {"promotions", "runs"}
    assert find_tables("from query_table('st' || 'eps')") == set(ROWS)
    assert find_tables("select 1") == set()


def test_an_open_attempt_is_as_far_as_its_heartbeat_says_now(bard: FabricatedRun, work: Path) -> None:
    sql = "select r.step, a.last_step, a.tokens from runs r join training_attempts a using (run_id) where attempt = 2"
    assert ask(bard.log.store, sql, work) == [{"step": 33, "last_step": 33, "tokens": 9}]
    bard.beat(36)
    assert ask(bard.log.store, sql, work) == [{"step": 36, "last_step": 36, "tokens": 9}]


def test_only_a_run_that_trains_has_a_speed_and_a_time_to_go(bard: FabricatedRun, work: Path) -> None:
    sql = "select tokens_per_second, seconds_left from runs"
    assert ask(bard.log.store, sql, work) == [{"tokens_per_second": 8.0, "seconds_left": (40 - 33) * 2 * 8 / 8.0}]
    bard.end("preempted", action="resume", charged="preempted")
    assert ask(bard.log.store, sql, work) == [{"tokens_per_second": None, "seconds_left": None}]


def test_an_owner_that_is_gone_interrupts_its_run(
    store: LocalStore, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabricate(store, "left").start()
    monkeypatch.setattr("cairn.tasks.machine.placement.is_known_dead", lambda placement: placement.host == "elsewhere")
    assert ask(store, "select state from runs", work) == [{"state": "interrupted"}]
    monkeypatch.setattr("cairn.tasks.machine.placement.is_known_dead", lambda placement: False)
    assert ask(store, "select state from runs", work) == [{"state": "running"}]


def test_steps_trained_since_the_last_question_are_there(bard: FabricatedRun, work: Path) -> None:
    write_steps(bard.log, 1, range(1, 21), **DRAWN)
    write_steps(bard.log, 2, range(21, 26), **DRAWN)
    counted = "select count(*) as n, max(step) as newest from steps"
    assert ask(bard.log.store, counted, work) == [{"n": 25, "newest": 25}]
    write_steps(bard.log, 2, range(26, 34), **DRAWN)
    assert ask(bard.log.store, counted, work) == [{"n": 33, "newest": 33}]


def test_a_store_whose_path_is_a_pattern_can_be_asked(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "it's [1] *")
    fabricate(store, "odd")
    assert [ask(store, "select run_id from runs", tmp_path / "cache") for _ in range(2)] == [[{"run_id": "odd"}]] * 2
