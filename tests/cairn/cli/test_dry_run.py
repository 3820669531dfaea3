"""`cairn train --dry-run`: what it tells of new, interrupted, owned and finished runs, and that it changes nothing."""

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.cli.texts import describe_plan
from cairn.flows.preparation import preflight
from cairn.flows.preparation.preflight import AvailableMemory, StoreRoom, require_room, store_room
from cairn.flows.preparation.training_plan import TrainingPlan, plan_training
from cairn.model.estimates.size_estimate import TrainingPlace
from cairn.storage.logs.log_entry import Arithmetic
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores import local_disk
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.machine.arithmetic import arithmetic_here
from cairn.tasks.policy.attempt_sizes import AttemptSizes
from tests.commands import Cairn
from tests.fabricated_run import write_steps
from tests.memory_store import MemoryStore
from tests.writing_run import WritingRun, configuration, open_writing_run

UNKNOWN_MEMORY = AvailableMemory(bytes=None, cores=1, place=TrainingPlace())
CONFIG = """
[data]
sources = ["text.txt"]
tokenizer = "bytes"
[model]
n_layer = 2
n_head = 2
n_embd = 8
block_size = 16
[training]
steps = 50
global_batch = 4
[checkpoint]
every_steps = 20
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n\n".join(f"line {number} of a text" for number in range(100)))
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def written(tmp_path: Path, store: LocalStore) -> WritingRun:
    """A run of 40 steps with a real snapshot; nothing is trained."""
    return open_writing_run(store, tmp_path)


def planned(run: WritingRun, config: RunConfig | None = None) -> TrainingPlan:
    run.log.refresh()
    return plan_training(run.log, config or run.config, Path.cwd(), UNKNOWN_MEMORY)


def shown(plan: TrainingPlan) -> dict[str, str]:
    return dict(describe_plan(plan, RunConfig.model_validate(plan.config)))


def told(cairn: Cairn, *arguments: str, **environment: str) -> Any:
    ended = cairn("train", "run.toml", "--dry-run", *arguments, **environment)
    assert ended.code == 0, ended.err
    return json.loads(ended.out) if "--json" in arguments else ended.out


def changed(config: RunConfig, section: str, **rules: Any) -> RunConfig:
    """Return the configuration with other values in one of its sections."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=rules)})


@pytest.mark.usefixtures("config")
def test_a_new_run_would_be_opened_at_step_0(cairn: Cairn) -> None:
    plan = told(cairn, "--json")
    total_steps = plan["config"]["training"]["steps"]
    assert (plan["action"], plan["attempt"], plan["from_step"], total_steps) == ("open", 1, 0, 50)
    assert (plan["tokens_per_step"], plan["tokens_ahead"]) == (64, 3200)
    each, room = 3 * 4 * 3944, plan["room"]
    assert plan["commits"] == 3
    assert (room["bytes_each"], room["kept_at_most"], room["needed_bytes"]) == (each, 3, 3 * each)
    assert room["free_bytes"] > 0
    assert plan["parameters"] == 3944 and plan["data"]["snapshot_id"] is None
    assert (plan["evaluated_commits"], plan["suites"]) == (3, ["held-out"])


@pytest.mark.usefixtures("config")
def test_people_read_one_fact_a_line(cairn: Cairn) -> None:
    names = [line.split("  ")[0] for line in told(cairn).splitlines()]
    expected = "would because store data model optimizer memory steps time checkpoints room evaluations"
    assert names == [*expected.split(), "retries left"]


@pytest.mark.usefixtures("config")
def test_the_rate_the_faults_and_the_run_as_its_own_family_are_told(cairn: Cairn) -> None:
    muon = ("--set", "training.optimizer=muon", "--set", "training.grad_clip=0", "--run-id", "wide")
    out = told(cairn, *muon, CAIRN_FAULTS="preempt@20,kill@30")
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "muon, learning rate 0.001 (matrices at 0.02) after 5 steps of warm-up, cosine down to" in lines["optimizer"]
    assert "no gradient is clipped" in lines["optimizer"] and "are injected: preempt@20,kill@30" in lines["faults"]
    assert "model" in lines and " wide: 3,944 parameters" in lines["model"]


def test_the_sizes_of_both_splits_are_told_before_anything_is_tokenized(cairn: Cairn, config: Path) -> None:
    size = (config.parent / "text.txt").stat().st_size
    border = int(size * 0.9)
    assert f"{border:,} bytes to train on, {size - border:,} held out\n" in told(cairn)
    told_of_many = told(cairn, "--set", "data.split=documents", "--set", "data.max_document_bytes=100")
    assert "warning: that is " in told_of_many


def test_text_that_train_refuses_is_refused_with_the_same_words(config: Path, cairn: Cairn) -> None:
    lines = [json.dumps({"text": f"line {number} of the text"}) for number in range(900)]
    (config.parent / "lines.jsonl").write_text("\n".join([*lines, *['{"body": "x"}'] * 100]))
    settings = ("--set", 'data.sources=["lines.jsonl"]', "--set", "training.steps=1")
    planned, trained = (cairn("train", "run.toml", *settings, *more) for more in (("--dry-run",), ()))
    assert planned.code == trained.code == 2
    (refused,) = (line for line in planned.err.splitlines() if "100 of 1000 documents cannot be used" in line)
    assert refused in trained.err.splitlines()


def test_a_block_may_be_as_long_as_the_shorter_split_but_for_one_token(config: Path, cairn: Cairn) -> None:
    def refusal(block_size: int) -> str:
        return cairn("train", "run.toml", "--dry-run", "--set", f"model.block_size={block_size}").err

    most = re.search(r"block_size is at most (\d+)", refusal(5000))
    assert most is not None
    assert refusal(int(most[1])) == "" and f"at most {most[1]}" in refusal(int(most[1]) + 1)


def test_the_parameters_of_an_own_network_are_those_of_its_trial(
    written: WritingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = AttemptSizes(micro_batch=4, activation_checkpointing=False)
    estimate = preflight.estimate_trainer(written.config, 257, sizes, UNKNOWN_MEMORY)
    monkeypatch.setattr(
        preflight.machine_speed, "try_module", lambda *given: replace(estimate, parameters_bytes=4 * 1234)
    )
    own = written.config.model.model_copy(update={"module": "net.py:build"})
    plan = planned(written, written.config.model_copy(update={"model": own}))
    assert plan.parameters == 1234


def test_nothing_is_written(cairn: Cairn, config: Path) -> None:
    told(cairn)
    assert {path.name for path in config.parent.iterdir()} - {"cache"} == {"run.toml", "text.txt"}


def test_text_that_was_tokenized_before_is_known(tmp_path: Path, store: LocalStore, written: WritingRun) -> None:
    assert written.log.state.opened is not None
    plan = plan_training(RunLog(store, "another"), configuration(tmp_path), tmp_path, UNKNOWN_MEMORY)
    assert plan.action == "open" and plan.data.snapshot_id == written.log.state.opened.data_snapshot


@pytest.mark.slow  # the child imports torch; every trainer describes its arithmetic in the same words
def test_a_child_finds_the_arithmetic_of_this_machine() -> None:
    found = arithmetic_here("cpu", "native")
    assert found is not None and found.name == "native" and found.digest


def test_an_interrupted_run_would_continue_from_its_newest_commit(
    written: WritingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Arithmetic(digest="d3", name="native", processor="p3", instructions="i3", libraries="l3", flags="f3")
    monkeypatch.setattr("cairn.flows.preparation.training_plan.arithmetic_here", lambda device, name: here)
    written.start()
    written.commit(10)
    written.end("preempted")
    plan = planned(written)
    assert (plan.action, plan.attempt, plan.from_step, plan.tokens_ahead) == ("continue", 2, 10, 30 * 64)
    assert shown(plan)["would"] == "continue run bard from step 10 of 40 as attempt 2"
    assert shown(plan)["because"].startswith("attempt 1 ended: preempted")
    assert "arithmetic d3, not d1 as before" in plan.arithmetic_moved


def test_a_run_with_a_live_owner_would_wait_for_it(written: WritingRun) -> None:
    written.start()
    plan = planned(written)
    assert plan.action == "wait" and "exit code 7" in plan.why and shown(plan)["would"].startswith("wait for the owner")


def test_a_finished_run_would_train_nothing(written: WritingRun) -> None:
    written.start()
    written.finish(written.commit(40))
    written.end("completed")
    plan = planned(written)
    assert (plan.action, plan.attempt, plan.tokens_ahead) == ("nothing", None, 0)
    assert "steps" not in shown(plan) and shown(plan)["would"] == "train nothing: run bard is finished"


def test_a_run_killed_between_its_last_commit_and_its_end_would_be_finished(written: WritingRun) -> None:
    written.start()
    written.commit(40)
    written.end("lost")
    assert planned(written).action == "finish"


def test_time_is_what_the_newest_recorded_steps_say(written: WritingRun) -> None:
    for _ in range(2):
        written.start()
        written.end("preempted")
    write_steps(written.log, 1, range(1, 4), tokens_per_second=[0, 64.0, 640.0, 1.0].__getitem__)
    plan = planned(written)
    assert (plan.cost.tokens_per_second, plan.cost.seconds) == (64.0, 40.0)
    assert shown(plan)["time"] == "an estimate: 40 s of training at the 64 tokens/s of its newest steps"


def test_without_records_and_without_a_price_nothing_is_made_up(written: WritingRun) -> None:
    plan = planned(written)
    assert plan.cost.seconds is None and plan.cost.money is None
    assert "cost" not in shown(plan) and shown(plan)["time"] == "not known before the run has trained a step"


@pytest.mark.parametrize(("price", "words"), [(90.0, "1.00 EUR, at 90"), (0.09, "less than 0.01 EUR, at 0.09")])
def test_cost_is_hours_times_the_price(written: WritingRun, price: float, words: str) -> None:
    written.start()
    write_steps(written.log, 1, [1], tokens_per_second=64.0)
    written.end("preempted")
    config = changed(written.config, "cost", gpu_hour_price=price, currency="EUR")
    assert shown(planned(written, config))["cost"] == f"an estimate: {words} EUR an hour"


def test_budgets_are_those_of_the_configuration_at_hand(written: WritingRun) -> None:
    lost = written.config.budgets.lost.model_copy(update={"retries": 77})
    assert planned(written, changed(written.config, "budgets", lost=lost)).budgets["lost"].left == 77


@pytest.mark.parametrize(
    ("every", "keep_every", "ahead", "kept"), [(20, 0, 2, 2), (15, 0, 3, 3), (10, 0, 4, 4), (4, 8, 10, 9)]
)
def test_commits_are_counted_to_the_last_step(
    written: WritingRun, every: int, keep_every: int, ahead: int, kept: int
) -> None:
    found = planned(written, changed(written.config, "checkpoint", every_steps=every, keep_every=keep_every))
    assert (found.commits, found.room.kept_at_most) == (ahead, kept)


def room_of(written: WritingRun, **checkpoint: Any) -> StoreRoom:
    return planned(written, changed(written.config, "checkpoint", **checkpoint)).room


@pytest.mark.parametrize(
    ("rules", "needed", "late"),
    [
        pytest.param(
            (4, 2, 1), 2 + 1 + 2, 2, id="what is kept, one on its way in, one out; two more if an evaluator is slow"
        ),
        pytest.param((20, 9, 1), 2, 0, id="never more than there are commits"),
    ],
)
def test_there_is_room_for(written: WritingRun, rules: tuple[int, int, int], needed: int, late: int) -> None:
    room = room_of(written, **dict(zip(("every_steps", "keep_last", "keep_best"), rules, strict=True)))
    assert (room.needed_bytes, room.late_bytes) == (needed * room.bytes_each, late * room.bytes_each)


def test_what_a_run_has_in_the_store_already_needs_no_more_room(written: WritingRun) -> None:
    before = room_of(written, every_steps=4).needed_bytes
    written.start()
    committed = written.commit(4)
    written.log.refresh()
    record = written.log.state.find(committed.prefix)
    assert record is not None and room_of(written, every_steps=4).needed_bytes == before - record.committed.bytes


def test_a_bucket_has_no_free_space_to_ask_for_and_the_need_is_told(written: WritingRun) -> None:
    room = store_room(MemoryStore("bucket"), RunState(), written.config, 300)
    assert room.free_bytes is None and room.needed_bytes > 0
    require_room(MemoryStore("bucket"), room)


def test_a_run_whose_checkpoints_cannot_fit_is_refused_after_its_plan_and_before_it_is_opened(
    cairn: Cairn, config: Path
) -> None:
    many = ("training.steps=1000000000", "checkpoint.every_steps=1", "checkpoint.keep_last=1000000000")
    options = [word for setting in many for word in ("--set", setting)]
    for arguments in (("--dry-run",), ()):
        ended = cairn("train", "run.toml", *options, *arguments)
        assert ended.code == 2 and " are needed for checkpoints of" in ended.err
        assert "lower checkpoint.keep_last" in ended.err and ("room " in ended.out) == bool(arguments)
    assert not list((config.parent / "store").glob("runs/*"))


def test_the_store_of_the_configuration_is_planned_with(config: Path, cairn: Cairn) -> None:
    plan = told(cairn, "--json", "--set", "store=elsewhere", CAIRN_STORE="")
    assert plan["store"] == f"file://{config.parent / 'elsewhere'}"


def test_a_dry_run_says_that_the_file_system_makes_no_hard_links(
    config: Path, cairn: Cairn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(local_disk, "rename_to_new", lambda file, name: False)
    ended = cairn("train", str(config), "--dry-run")
    assert ended.code == 2 and "makes no hard links, which the log needs" in ended.err


@pytest.mark.usefixtures("config")
def test_a_dry_run_of_a_set_plans_each_of_its_runs(cairn: Cairn) -> None:
    plans = told(cairn, "--json", "--set", "training.lr=1e-3,3e-4")
    assert [plan["run_id"] for plan in plans] == ["run.lr=0.001", "run.lr=0.0003"]
    assert [plan["config"]["training"]["lr"] for plan in plans] == [1e-3, 3e-4]


def test_one_run_of_a_set_that_no_start_would_take_refuses_the_plan_of_all(config: Path, cairn: Cairn) -> None:
    ended = cairn("train", str(config), "--dry-run", "--set", "model.n_head=2,3")
    assert ended.code == 2 and "n_head" in ended.err
