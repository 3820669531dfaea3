"""Which run, store, configuration and arithmetic a training request means; the configuration is read once."""

import io
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from cairn.flows.preparation.training_request import (
    ResolvedRequest,
    TrainingRequest,
    configure_run,
    resolve_request,
    with_settings,
)
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import encode, sha256
from cairn.tasks.configuration.addresses import store_option
from cairn.tasks.configuration.configuration_source import load_configuration, parse_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import check_drift, keep_numerics
from cairn.tasks.errors import ConfigDrift, InvalidConfiguration
from tests.commands import run_python
from tests.entries import opened
from tests.fabricated_run import FabricatedRun

CONFIG = """
store = "kept/here"
[data]
sources = ["text.txt"]
[training]
steps = 4
"""
BY_ID = resolve_request(TrainingRequest(run_id="bard"), {})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def store_of(config: Path | str, *overrides: str, store: str = "", **environment: str) -> str:
    request = TrainingRequest(config=str(config), overrides=overrides, store=store)
    return resolve_request(request, environment).store_url


def test_the_option_goes_before_the_environment_and_that_before_the_configuration(config: Path) -> None:
    assert store_of(config, store="given", CAIRN_STORE="s3://from/environment") == "given"
    assert store_of(config, CAIRN_STORE="s3://from/environment") == "s3://from/environment"
    assert store_of(config) == str(config.parent / "kept/here")


def test_without_any_of_them_it_is_the_default() -> None:
    assert BY_ID.store_url == "./cairn-store"


def test_a_url_in_the_configuration_is_taken_as_it_is(config: Path) -> None:
    assert store_of(config, "store=s3://bucket/cairn") == "s3://bucket/cairn"


def test_a_store_cannot_be_overridden_where_no_configuration_is_named() -> None:
    with pytest.raises(InvalidConfiguration, match="named with --store"):
        resolve_request(TrainingRequest(run_id="bard", overrides=("store=elsewhere",)), {})


def test_where_a_run_is_kept_is_no_part_of_which_run_it_is_nor_of_its_receipts(config: Path) -> None:
    here = load_configuration(config, overrides=(), environment={})
    there = load_configuration(config, overrides=("store=s3://bucket/cairn",), environment={})
    assert here.frozen_sha256() == there.frozen_sha256() and here.document() == there.document()


@pytest.mark.parametrize(
    ("chosen", "option"),
    [("", ""), ("./cairn-store", " --store ./cairn-store"), ("here", ""), ("there", " --store there")],
)
def test_commands_to_try_name_the_store_only_where_it_would_not_be_found(chosen: str, option: str) -> None:
    assert store_option(chosen, {"CAIRN_STORE": "here"}) == option


def test_a_run_continued_by_its_id_keeps_the_settings_of_its_newest_attempt(fresh: FabricatedRun) -> None:
    fresh.start(overrides=("checkpoint.every_steps=5", "budgets.lost.retries=2"))
    wanted = configure_run(BY_ID, fresh.log.state, {})
    assert (wanted.checkpoint.every_steps, wanted.budgets.lost.retries) == (5, 2)


def test_overrides_lie_on_top_of_what_the_log_says(fresh: FabricatedRun) -> None:
    fresh.start(overrides=("checkpoint.every_steps=5",))
    wanted = configure_run(BY_ID, fresh.log.state, {"CAIRN_CHECKPOINT__EVERY_STEPS": "7"})
    assert wanted.checkpoint.every_steps == 7


def test_a_run_nobody_has_trained_yet_keeps_what_is_frozen(fresh: FabricatedRun) -> None:
    assert configure_run(BY_ID, fresh.log.state, {}).training.steps == 40


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL whose content changes with every read."""
    versions = iter(range(4, 9))
    text = '[data]\nsources = ["text.txt"]\n[training]\nsteps = {}\n'
    monkeypatch.setattr(fsspec, "open", lambda url, mode: io.BytesIO(text.format(next(versions)).encode()))
    yield "memory://runs/bard.toml"


def steps_in_flow(monkeypatch: pytest.MonkeyPatch, url: str) -> int:
    """Call the body of the flow `train-gpt` up to the run's opening; returns the steps it would train."""
    import cairn.flows.train_gpt as module
    from cairn.flows.watching import deployed_continuation

    class Reached(Exception):
        pass

    def open_run(resolved: ResolvedRequest, *services: object) -> None:
        raise Reached(configure_run(resolved, RunState(), {}).training.steps)

    monkeypatch.setattr(module.run_start, "open_run", open_run)
    monkeypatch.setattr(
        deployed_continuation, "check_before_start", lambda resolved, *others: configure_run(resolved, RunState(), {})
    )
    monkeypatch.setattr(module, "get_run_logger", logging.getLogger)
    with pytest.raises(Reached) as reached:
        module.train_gpt.fn(config=url)
    return int(str(reached.value))


def test_a_deployed_flow_run_reads_the_configuration_once(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    assert steps_in_flow(monkeypatch, url) == 4
    assert resolve_request(TrainingRequest(config=url), {}).configuration.training.steps == 5


@pytest.mark.parametrize("place", ["file", "override", "values", "environment"])
def test_a_deployed_set_with_rungs_or_a_budget_is_refused_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch, config: Path, place: str
) -> None:
    import cairn.flows.train_set as module

    monkeypatch.setattr(module, "start_run", None)
    if place == "file":
        config.write_text(f"{CONFIG}[set]\nsteps = 6\n")
    elif place == "environment":
        monkeypatch.setenv("CAIRN_SET__HALVING", "2")
    more = {"override": ["set.device_hours=2"], "values": ["set.halving=2,3"]}.get(place, [])
    with pytest.raises(InvalidConfiguration, match=r"\[set\] of .*run\.toml: .* none can wait .* `cairn train`"):
        module.train_set.fn(config=str(config), name="rates", overrides=["training.lr=1e-3,3e-4", *more])


def test_a_deployed_set_of_which_a_run_was_not_started_has_failed(
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    import cairn.flows.train_set as module

    class Started:
        def result(self) -> None:
            raise InvalidConfiguration("deployment 'train-gpt/gone': Prefect does not know it")

    monkeypatch.setattr(module, "start_run", SimpleNamespace(map=lambda members, **given: Started()))
    with pytest.raises(InvalidConfiguration, match="Prefect does not know it"):
        module.train_set.fn(config=str(config), name="rates", overrides=["training.lr=1e-3,3e-4"])


COUNTS_READS = """
import sys
from cairn.cli.command import run_command
reads = []
sys.addaudithook(lambda event, given: reads.append(given) if event == "open" and str(given[0]) == sys.argv[1] else None)
numerics = ["--set", "training.precision=fp32", "--set", "training.kernels=stock"]  # else a process measures both
code = run_command(["train", sys.argv[1], "--dry-run", "--json", *numerics])
print(code, len(reads), file=sys.stderr)
"""


def test_a_command_opens_its_configuration_file_once(config: Path) -> None:
    (config.parent / "text.txt").write_text("".join(f"line {number} of a text\n\n" for number in range(2000)))
    done = run_python(("-c", COUNTS_READS, str(config)), config.parent, {"CAIRN_STORE": ""})
    assert done.err.split()[-2:] == ["0", "1"], done.err


def test_a_field_of_the_form_sets_its_key_and_zero_sets_nothing() -> None:
    given = with_settings(("training.seed=7",), steps=60, learning_rate=1e-5, micro_batch=4)
    assert given == ("training.steps=60", "training.lr=1e-05", "training.micro_batch=4", "training.seed=7")
    assert with_settings((), steps=0, learning_rate=0.0, micro_batch=0) == ()


def test_a_key_in_its_field_and_in_the_overrides_is_refused_with_both_values() -> None:
    with pytest.raises(InvalidConfiguration, match=r"training.lr: .*\(0.001\) and by training.lr=2; keep one"):
        with_settings(("training.lr=2",), steps=0, learning_rate=1e-3, micro_batch=0)


GIVEN = {"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 301}


@pytest.fixture
def begun(config: Path) -> tuple[Path, RunState]:
    """A configuration that names weights and no key of their network, and the run that was opened with it."""
    config.write_text(f'{CONFIG}init_from = "weights"\n')
    (config.parent / "weights").mkdir()
    (config.parent / "weights" / "config.json").write_text(json.dumps(GIVEN))
    first = configure_run(resolve_request(TrainingRequest(config=str(config)), {}), RunState(), {})
    return config, RunState(opened=opened("run", config=first.frozen()))


def test_the_network_of_a_new_run_is_that_of_the_weights_it_begins_with(begun: tuple[Path, RunState]) -> None:
    state = begun[1]
    assert state.opened is not None
    wanted = {"n_embd": 12, "n_layer": 2, "n_head": 2, "block_size": 16, "vocab_size": 301, "dropout": 0.0}
    assert {key: state.opened.config["model"][key] for key in wanted} == wanted


def test_the_tokenizer_of_a_new_run_is_that_of_the_weights_it_begins_with(begun: tuple[Path, RunState]) -> None:
    state = begun[1]
    assert state.opened is not None and state.opened.config["data"]["tokenizer"] == "weights/tokenizer.json"


def test_a_run_that_is_open_has_its_network_from_the_log_and_never_from_the_folder(
    begun: tuple[Path, RunState],
) -> None:
    config, state = begun
    shutil.rmtree(config.parent / "weights")
    assert state.opened is not None
    again = configure_run(resolve_request(TrainingRequest(config=str(config)), {}), state, {})
    check_drift(state.opened.config, again, run_id="run")


def test_a_key_of_the_network_that_is_given_now_is_compared_with_the_log(begun: tuple[Path, RunState]) -> None:
    config, state = begun
    request = TrainingRequest(config=str(config), overrides=("model.n_layer=3",))
    assert state.opened is not None
    with pytest.raises(ConfigDrift, match=r"model\.n_layer: run has 2, this command has 3"):
        check_drift(state.opened.config, configure_run(resolve_request(request, {}), state, {}), run_id="run")


OPENED_IN_HALF = {"precision": "bf16", "kernels": "fused"}


def configured(**training: Any) -> RunConfig:
    document = {"data": {"sources": ["text.txt"]}, "training": {"steps": 9, **training}}
    return parse_configuration(document, overrides=(), environment={}, name="test")


def frozen_with(**training: Any) -> dict[str, Any]:
    return configured(**training).frozen()


def test_a_file_that_leaves_the_choice_to_cairn_continues_as_what_was_frozen() -> None:
    frozen = frozen_with(**OPENED_IN_HALF)
    again = keep_numerics(configured(), frozen)
    assert (again.training.precision, again.training.kernels) == ("bf16", "fused")
    assert again.frozen_sha256() == sha256(encode(frozen))
    check_drift(frozen, again, run_id="bard")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"precision": "fp32"}, "training.precision: run has 'bf16', this command has 'fp32'"),
        ({"kernels": "stock"}, "training.kernels: run has 'fused', this command has 'stock'"),
    ],
)
def test_another_arithmetic_than_the_frozen_one_is_drift(said: dict[str, str], words: str) -> None:
    frozen = frozen_with(**OPENED_IN_HALF)
    with pytest.raises(ConfigDrift, match=words):
        check_drift(frozen, keep_numerics(configured(**said), frozen), run_id="bard")


def test_saying_what_is_frozen_is_no_drift() -> None:
    frozen = frozen_with(**OPENED_IN_HALF)
    check_drift(frozen, keep_numerics(configured(**OPENED_IN_HALF), frozen), run_id="bard")


def test_a_run_continued_by_its_id_asks_for_nothing_new(fresh: FabricatedRun) -> None:
    wanted = configure_run(BY_ID, fresh.log.state, {})
    assert (wanted.training.precision, wanted.training.kernels) == ("fp32", "stock")


def test_asking_for_the_choice_again_does_not_change_a_run(fresh: FabricatedRun) -> None:
    wanted = configure_run(BY_ID, fresh.log.state, {"CAIRN_TRAINING__PRECISION": "auto"})
    assert wanted.training.precision == "fp32"
