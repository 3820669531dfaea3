"""The arithmetic of a run: chosen when it is opened, frozen, and never chosen again."""

from typing import Any

import pytest

from cairn.flows.preparation.training_request import TrainingRequest, configure_run, resolve_request
from cairn.storage.stores.codec import encode, sha256
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import check_drift, keep_numerics
from cairn.tasks.errors import ConfigDrift
from tests.fabricated_run import FabricatedRun

BY_ID = resolve_request(TrainingRequest(run_id="bard"), {})
OPENED_IN_HALF = {"precision": "bf16", "kernels": "fused"}


def configured(**training: Any) -> RunConfig:
    document = {"data": {"sources": ["text.txt"]}, "training": {"steps": 9, **training}}
    return parse_configuration(document, overrides=(), environment={}, name="test")


def opened(**training: Any) -> dict[str, Any]:
    return configured(**training).frozen()


def test_a_file_that_leaves_the_choice_to_cairn_continues_as_what_was_frozen() -> None:
    frozen = opened(**OPENED_IN_HALF)
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
    frozen = opened(**OPENED_IN_HALF)
    with pytest.raises(ConfigDrift, match=words):
        check_drift(frozen, keep_numerics(configured(**said), frozen), run_id="bard")


def test_saying_what_is_frozen_is_no_drift() -> None:
    frozen = opened(**OPENED_IN_HALF)
    check_drift(frozen, keep_numerics(configured(**OPENED_IN_HALF), frozen), run_id="bard")


def test_a_run_continued_by_its_id_asks_for_nothing_new(fresh: FabricatedRun) -> None:
    wanted = configure_run(BY_ID, fresh.log.state, {})
    assert (wanted.training.precision, wanted.training.kernels) == ("fp32", "stock")


def test_asking_for_the_choice_again_does_not_change_a_run(fresh: FabricatedRun) -> None:
    wanted = configure_run(BY_ID, fresh.log.state, {"CAIRN_TRAINING__PRECISION": "auto"})
    assert wanted.training.precision == "fp32"
