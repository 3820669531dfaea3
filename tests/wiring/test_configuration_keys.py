"""Every configuration key acts: a case of the table starts a trainer or the flow with it, or a named test does."""

import ast
from pathlib import Path

import pytest

from cairn.tasks.configuration.key_reference import keys_by_name
from cairn.tasks.errors import InvalidConfiguration
from tests.tasks.trainer_in_process import TrainingWorld
from tests.wiring import data_keys, flow_keys, outcome_keys, training_keys
from tests.wiring.bench import Bench
from tests.wiring.flow_in_process import FlowWorld
from tests.wiring.key_table import CASES, NAMED, REFUSED

ROOT = Path(__file__).parents[2]
TABLES = (training_keys, data_keys, flow_keys, outcome_keys)
"""Imported for their entries."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> TrainingWorld:
    return TrainingWorld(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def bench(shared: TrainingWorld, flow: FlowWorld, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(shared, flow, monkeypatch)


def test_every_key_has_a_case_or_a_test_and_no_other_has() -> None:
    assert set(keys_by_name()) == {*CASES, *NAMED, *REFUSED}


def test_every_test_that_the_table_names_exists() -> None:
    for test in NAMED.values():
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_key_without_effect_is_refused(key: str, flow: FlowWorld) -> None:
    with pytest.raises(InvalidConfiguration, match=r"evaluator-failed\.samples"):
        flow.check("budgets.evaluator-failed.retries=1", f"{key}=1")


@pytest.mark.parametrize("case", dict.fromkeys(CASES.values()), ids=lambda case: case.__name__)
def test_the_key_acts(case: object, bench: Bench) -> None:
    assert callable(case)
    case(bench)
