"""What an evaluation measures follows from the configuration: the evaluator's own functions, on a real checkpoint."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cairn.flows.operations.checkpoint_operations import plan_evaluation
from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.prediction import held_out_loss
from cairn.storage.logs.run_entries import EvaluationFailed, EvaluationRecorded
from cairn.storage.logs.window_losses import read_losses
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.settings import EvaluatorConfig
from cairn.tasks.evaluator import evaluator
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan, EvaluationSpec, Measurement, Suite, record_evaluation
from cairn.tasks.evaluator.evaluator import _open, measure_held_out
from cairn.tasks.evaluator.evaluator_process import EvaluationResult, Outcome
from cairn.tasks.trainer.initial_weights import WeightsSource, keep_source
from tests.tasks.committed_model import CommittedModel, commit_model, small_configuration
from tests.tasks.corpus_files import shaped

SUITE: dict[str, Any] = {
    "name": "own-words",
    "batches": 3,
    "batch_size": 5,
    "prompts": ["Zeile ", "the "],
    "sample_tokens": 7,
    "sample_seed": 11,
}


class EvaluatorHere:
    """Measures a spec as the evaluator's process does, in this one, and keeps it."""

    def __init__(self) -> None:
        self.specs: list[EvaluationSpec] = []
        self.timeouts: list[float] = []

    def __call__(self, spec: bytes, timeout_seconds: float) -> Outcome:
        self.specs.append(EvaluationSpec.model_validate_json(spec))
        self.timeouts.append(timeout_seconds)
        suite = self.specs[-1].plan.suite
        assert isinstance(suite, Suite)
        result = measure_held_out(_open(self.specs[-1], self.specs[-1].plan.device), suite)
        return Outcome(result=msgspec.json.encode(result), problem="")


Evaluate = Callable[..., tuple[EvaluationRecorded, EvaluatorHere]]


both = pytest.mark.parametrize("made", ["gpt2", "qwen3"], indirect=True)


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CommittedModel:
    folder, model = tmp_path_factory.mktemp("evaluated"), {"architecture": getattr(request, "param", "gpt2")}
    return commit_model(LocalStore(folder / "store"), folder, small_configuration(model=model))


@pytest.fixture
def evaluate(made: CommittedModel, tmp_path: Path) -> Evaluate:
    """Evaluate the checkpoint by the run's configuration with this `[evaluation]`."""

    def run(training: Any = None, **evaluation: Any) -> tuple[EvaluationRecorded, EvaluatorHere]:
        evaluator = EvaluatorHere()
        plan = plan_of(made, tmp_path, training=training, **evaluation)
        asked = Measurement(reference=made.reference, plan=plan, again=True)
        recorded = record_evaluation(made.log, asked, measure=evaluator)
        assert isinstance(recorded, EvaluationRecorded)
        return recorded, evaluator

    return run


def plan_of(
    made: CommittedModel, folder: Path, *, training: Any = None, budgets: Any = None, **evaluation: Any
) -> EvaluationPlan:
    document = made.config.document()
    document["evaluation"] |= SUITE | evaluation
    document["training"] |= training or {}
    document["budgets"] |= budgets or {}
    config = type(made.config).model_validate(document)
    return plan_evaluation(config, made.snapshot_id, folder)


def held_out(made: CommittedModel, folder: Path, split: str = "val", **slices: int) -> tuple[float, int, float]:
    """Measure the network itself: the loss, the number of windows, and the bytes of a token of this split."""
    snapshot = open_snapshot(made.log.store, made.snapshot_id, folder / "judge")
    windows = TokenWindows(getattr(snapshot, split), made.config.model.block_size, snapshot.manifest.vocab_size)
    loss, count = held_out_loss(made.state.model, windows, **slices)
    sizes = snapshot.manifest.split(split)  # type: ignore[arg-type]
    return loss, count, sizes.bytes / sizes.tokens


@both
def test_the_loss_is_of_the_held_out_windows_that_the_suite_asks_for(
    made: CommittedModel, evaluate: Evaluate, tmp_path: Path
) -> None:
    recorded, _ = evaluate()
    loss, count, _ = held_out(made, tmp_path, batches=3, batch_size=5)
    assert recorded.metrics["val_loss"] == pytest.approx(loss, rel=1e-6) and recorded.metrics["samples"] == count == 15
    assert held_out(made, tmp_path, "train", batches=3, batch_size=5)[0] != pytest.approx(loss, rel=1e-6)


def test_each_windows_loss_is_kept_beside_the_log_and_their_mean_is_the_loss(
    made: CommittedModel, evaluate: Evaluate
) -> None:
    recorded, _ = evaluate()
    assert recorded.window_losses_sha256 is not None
    kept = read_losses(made.log.store, made.log.prefix, recorded.window_losses_sha256)
    losses = kept.losses["val_loss"]
    assert (len(losses), kept.window_tokens) == (15, made.config.model.block_size)
    assert len(set(losses)) == 15 and sum(losses) / 15 == pytest.approx(recorded.metrics["val_loss"], abs=1e-5)


def test_a_small_split_is_measured_whole_and_a_larger_one_by_the_slice_asked_for(
    made: CommittedModel, evaluate: Evaluate, tmp_path: Path
) -> None:
    whole = held_out(made, tmp_path, batches=10_000, batch_size=1)[1]
    counted = {
        batches: evaluate(batches=batches, batch_size=1)[0].metrics["samples"]
        for batches in (whole // 4, -(-whole // 4))
    }
    assert counted == {whole // 4: whole // 4 if whole % 4 else whole, -(-whole // 4): whole}


def test_bits_per_byte_divide_by_the_bytes_of_a_held_out_token(
    made: CommittedModel, evaluate: Evaluate, tmp_path: Path
) -> None:
    recorded, _ = evaluate()
    *_, bytes_per_token = held_out(made, tmp_path, batches=1, batch_size=1)
    bits = recorded.metrics["val_loss"] / math.log(2)
    assert recorded.metrics["bits_per_byte"] == pytest.approx(bits / bytes_per_token, rel=1e-9)
    *_, of_train = held_out(made, tmp_path, "train", batches=1, batch_size=1)
    assert of_train != pytest.approx(bytes_per_token, rel=1e-6), "else the train split's would do"


@pytest.mark.parametrize(
    "data",
    [
        {"sources": ["text.jsonl", "other.jsonl"], "weights": [2, 1]},
        {"sources": ["text.jsonl"], "weights": [1], "val_sources": ["other.jsonl", "third.jsonl"]},
    ],
    ids=["a part of each", "files of their own"],
)
def test_each_weighted_source_has_a_held_out_loss_of_its_own(data: dict[str, Any], tmp_path: Path) -> None:
    for name in ("other", "third"):
        (tmp_path / f"{name}.jsonl").write_bytes(shaped([f"{number} {name} " * 40 for number in range(200)], "jsonl"))
    config = small_configuration(data=data)
    made, evaluator = commit_model(LocalStore(tmp_path / "store"), tmp_path, config), EvaluatorHere()
    asked = Measurement(reference=made.reference, plan=plan_of(made, tmp_path))
    recorded = record_evaluation(made.log, asked, measure=evaluator)
    assert isinstance(recorded, EvaluationRecorded)
    snapshot = open_snapshot(made.log.store, evaluator.specs[0].plan.snapshot_id, tmp_path / "judge")
    stream, start = np.concatenate([shard.tokens() for shard in snapshot.val]), 0
    measured = [group for group in snapshot.manifest.known_groups if group.val_tokens]
    for group in measured:
        first = -(-start // 16) * 16  # windows are those of the whole stream
        own = TokenWindows([stream[first : start + group.val_tokens]], 16, snapshot.manifest.vocab_size)
        start += group.val_tokens
        loss, _ = held_out_loss(made.state.model, own, batches=2, batch_size=5)
        assert recorded.metrics[f"val_loss/{group.name}"] == pytest.approx(loss, rel=1e-6)
    assert [group.name for group in measured] == data.get("val_sources", sorted(data["sources"]))
    assert sum(name.startswith("val_loss/") for name in recorded.metrics) == len(measured)


def test_samples_follow_from_prompts_length_and_seed(evaluate: Evaluate) -> None:
    recorded, _ = evaluate()
    assert all(map(str.startswith, recorded.samples, SUITE["prompts"])) and len(recorded.samples) == 2
    assert evaluate()[0].samples == recorded.samples
    assert evaluate(sample_seed=12)[0].samples != recorded.samples
    assert all(map(str.startswith, evaluate(sample_tokens=20)[0].samples, recorded.samples))
    assert evaluate(sample_tokens=0)[0].samples == tuple(SUITE["prompts"])


@both
def test_the_evaluator_masks_documents_where_the_run_does(evaluate: Evaluate) -> None:
    masked, evaluator = evaluate(training={"mask_documents": True})
    assert evaluator.specs[0].plan.mask_documents
    assert masked.metrics["val_loss"] != evaluate()[0].metrics["val_loss"]


def test_an_evaluator_is_sent_what_plan_and_log_say(made: CommittedModel, evaluate: Evaluate, tmp_path: Path) -> None:
    recorded, evaluator = evaluate(timeout_seconds=77.5)
    (spec,) = evaluator.specs
    assert evaluator.timeouts == [77.5]
    wanted = (made.snapshot_id, made.config.model, made.reference)
    assert (spec.plan.snapshot_id, spec.plan.model, spec.checkpoint) == wanted
    assert (spec.plan.device, spec.plan.threads, spec.plan.cache_dir) == ("cpu", 1, tmp_path / "snapshots")
    assert (recorded.suite, recorded.suite_sha256) == ("own-words", spec.plan.suite.sha256)
    assert (recorded.step, recorded.manifest_sha256) == (7, made.reference.manifest_sha256)
    assert recorded.data_snapshot == made.snapshot_id


@pytest.mark.parametrize("retries", [0, 2])
def test_a_failed_evaluator_is_run_again_as_often_as_its_budget_says(
    made: CommittedModel, tmp_path: Path, retries: int
) -> None:
    plan = plan_of(made, tmp_path, budgets={"evaluator_failed": {"retries": retries}}, name=f"failing-{retries}")
    runs: list[float] = []

    def fall_over(spec: bytes, timeout_seconds: float) -> Outcome:
        runs.append(timeout_seconds)
        return Outcome(result=b"", problem="it fell over")

    failed = record_evaluation(made.log, Measurement(reference=made.reference, plan=plan), measure=fall_over)
    assert isinstance(failed, EvaluationFailed) and len(runs) == retries + 1


def test_a_command_gets_the_documents_of_the_weights_that_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = LocalStore(tmp_path / "store"), list[bytes]()
    source = WeightsSource(
        name="a", licence="", files={}, documents={"tokenizer_config.json": '{"chat_template": "x"}'}
    )
    made = commit_model(store, tmp_path, small_configuration(), initial_source_sha256=keep_source(store, source))

    def read(suite: EvaluatorConfig, spec: EvaluationSpec) -> EvaluationResult:
        assert spec.folder is not None
        seen.append((spec.folder / "model" / "tokenizer_config.json").read_bytes())
        return EvaluationResult(metrics={"accuracy": 0.5}, samples=())

    def measure(spec: bytes, timeout_seconds: float) -> Outcome:
        result = evaluator._measure_by_command(EvaluationSpec.model_validate_json(spec), command)
        return Outcome(result=msgspec.json.encode(result), problem="")

    monkeypatch.setattr(evaluator, "run_command", read)
    monkeypatch.setattr(evaluator, "guard_group", object)
    command = EvaluatorConfig(name="command", command=("true",))
    plan = replace(plan_of(made, tmp_path), suite=command)
    record_evaluation(made.log, Measurement(reference=made.reference, plan=plan), measure=measure)
    assert [msgspec.json.decode(document) for document in seen] == [{"chat_template": "x"}]
