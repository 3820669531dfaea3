from pathlib import Path

import pytest

from flows.preparation.preflight import TrainingRequest
from flows.preparation.training_store import store_option, training_store
from tasks.configuration.run_configuration import load_configuration
from tasks.errors import InvalidConfiguration

CONFIG = """
store = "kept/here"
[data]
sources = ["text.txt"]
[training]
steps = 4
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def request(config: Path | str, *overrides: str) -> TrainingRequest:
    return TrainingRequest(config=str(config), run_id="", overrides=overrides)


def test_the_option_goes_before_the_environment_and_that_before_the_configuration(config: Path) -> None:
    environment = {"CAIRN_STORE": "s3://from/environment"}
    assert training_store("given", request(config), environment) == "given"
    assert training_store("", request(config), environment) == "s3://from/environment"
    assert training_store("", request(config), {}) == str(config.parent / "kept/here")


def test_without_any_of_them_it_is_the_default() -> None:
    assert training_store("", TrainingRequest(config="", run_id="bard", overrides=()), {}) == "./cairn-store"


def test_a_url_in_the_configuration_is_taken_as_it_is(config: Path) -> None:
    assert training_store("", request(config, "store=s3://bucket/cairn"), {}) == "s3://bucket/cairn"


def test_a_store_cannot_be_overridden_where_no_configuration_is_named() -> None:
    by_id = TrainingRequest(config="", run_id="bard", overrides=("store=elsewhere",))
    with pytest.raises(InvalidConfiguration, match="named with --store"):
        training_store("", by_id, {})


def test_where_a_run_is_kept_is_no_part_of_which_run_it_is_nor_of_its_receipts(config: Path) -> None:
    here = load_configuration(config, overrides=(), environment={})
    there = load_configuration(config, overrides=("store=s3://bucket/cairn",), environment={})
    assert here.frozen_sha256() == there.frozen_sha256() and here.document() == there.document()


@pytest.mark.parametrize(("chosen", "option"), [("./cairn-store", ""), ("here", ""), ("there", "there")])
def test_commands_to_try_name_the_store_only_where_it_would_not_be_found(chosen: str, option: str) -> None:
    assert store_option(chosen, {"CAIRN_STORE": "here"}) == option
