"""Memory asked for before a trainer starts: what is refused and in which words, and what `auto` chooses."""

from dataclasses import replace
from typing import Any

import pytest

from cairn.flows.preparation.preflight import (
    MARGIN,
    AvailableMemory,
    available_memory,
    choose_workers,
    estimate_trainer,
    memory_room,
    require_memory,
)
from cairn.model.configuration.network import ModelConfig
from cairn.model.estimates.size_estimate import MemoryEstimate, TrainingPlace, estimate_memory
from cairn.storage.logs.fold_cache import History
from cairn.storage.logs.run_log import end_attempt
from cairn.storage.logs.run_state import AttemptRecord, RunState
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine import machine_speed
from cairn.tasks.policy.attempt_sizes import AttemptSizes, next_sizes
from cairn.tasks.trainer.trainer_group import TrainerGroup
from tests.entries import ended, started
from tests.storage.builders import clock

VOCABULARY = 8192


def configured(**training: Any) -> RunConfig:
    exact = {"precision": "fp32", "kernels": "stock", "probe_every_steps": 0}
    mode = {**exact, "steps": 1, "global_batch": 32, **training}
    model = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256}
    return RunConfig.model_validate({"data": {"sources": ["text.txt"]}, "model": model, "training": mode})


def needed(config: RunConfig, windows: int, *, recompute: bool = False) -> int:
    return estimate_memory(
        config.model, config.training, VOCABULARY, micro_batch=windows, recompute=recompute
    ).total_bytes


def there(size: int | None) -> AvailableMemory:
    return AvailableMemory(bytes=size, cores=4, place=TrainingPlace())


def refusal(config: RunConfig, size: int) -> str:
    sizes = next_sizes(RunState(), config.training, config.model.block_size)
    with pytest.raises(InvalidConfiguration) as refused:
        require_memory(config, VOCABULARY, sizes, there(size))
    return str(refused.value)


def test_what_fits_is_not_refused() -> None:
    config = configured(micro_batch=8)
    sizes = AttemptSizes(micro_batch=8, activation_checkpointing=False)
    require_memory(config, VOCABULARY, sizes, there(needed(config, 8)))


def test_the_refusal_is_one_line_with_the_estimate_what_is_there_and_what_fits() -> None:
    config = configured(micro_batch=16)
    said = refusal(config, needed(config, 4))
    assert "\n" not in said and "training.micro_batch = 16" in said and "at most 4 fits" in said
    assert f"{needed(config, 16) / 1e9:.3g} GB" in said and f"{needed(config, 4) / 1e9:.3g} GB are available" in said


def test_where_not_even_one_window_fits_recomputing_is_the_cure() -> None:
    config = configured(micro_batch=1)
    said = refusal(config, needed(config, 2, recompute=True))
    assert "not even 1 fits, but 2 with training.activation_checkpointing = true" in said


def test_where_nothing_helps_it_says_so() -> None:
    assert "train a smaller model" in refusal(configured(micro_batch=1), 10**6)


def test_auto_is_refused_where_it_does_not_fit_with_the_value_to_set() -> None:
    config = configured(micro_batch="auto")
    said = refusal(config, needed(config, 2))
    assert "training.micro_batch = 4:" in said and "at most 2 fits" in said


@pytest.mark.parametrize("size", [None, 1])
def test_nothing_is_refused_where_nobody_knows_or_nobody_wants_to(size: int | None) -> None:
    config = configured(micro_batch=16, memory_check=size is None)
    require_memory(config, VOCABULARY, AttemptSizes(micro_batch=16, activation_checkpointing=False), there(size))


def test_a_module_is_tried_in_the_arithmetic_that_a_cpu_gets_and_refused_with_its_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, tried = configured(micro_batch=16, precision="auto", kernels="auto"), list[str]()
    estimate = estimate_memory(config.model, configured().training, VOCABULARY, micro_batch=16, recompute=False)

    def try_module(config: RunConfig, *_: object) -> MemoryEstimate:
        tried.append(config.training.precision)
        return estimate

    monkeypatch.setattr(machine_speed, "try_module", try_module)
    own = config.model_copy(update={"model": ModelConfig.model_validate({"module": "net.py:build"})})
    assert "training.micro_batch = 16" in refusal(own, 10**6) and set(tried) == {"fp32"}


def test_a_mode_still_open_is_refused_only_where_its_leanest_cannot_fit() -> None:
    config = configured(micro_batch=16, precision="auto", kernels="auto")
    lean = min(
        needed(config.with_mode(precision=precision, kernels=kernels), 16)
        for precision in ("fp32", "bf16")
        for kernels in ("stock", "fused")
    )
    require_memory(config, VOCABULARY, AttemptSizes(micro_batch=16, activation_checkpointing=False), there(lean))
    assert "training.micro_batch = 16" in refusal(config, lean - 1)


SHARED = AttemptSizes(micro_batch=4, activation_checkpointing=False)


@pytest.mark.parametrize(
    ("cores", "settings", "workers"),
    [
        (1, {}, 1),
        (4, {}, 4),
        (64, {}, 8),
        (4, {"workers": 7}, 7),
        (1, {"workers": 99}, 8),
        (4, {"compile": True}, 1),
        (4, {"precision": "fp16"}, 1),
        (4, {"device": "mps"}, 1),
    ],
)
def test_as_many_micro_batches_are_computed_at_once_as_there_are_cores_and_micro_batches(
    cores: int, settings: dict[str, Any], workers: int
) -> None:
    config = configured(micro_batch=4, **settings)
    assert choose_workers(config, VOCABULARY, SHARED, replace(there(None), cores=cores)) == workers


def test_each_of_two_processes_computes_its_half_of_them_at_once() -> None:
    two = replace(there(None), place=TrainingPlace(processes=2), cores=64)
    assert choose_workers(configured(micro_batch=4), VOCABULARY, SHARED, two) == 4


def test_of_those_that_draw_numbers_one_is_computed_at_once() -> None:
    config = configured(micro_batch=4)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dropout": 0.1})})
    assert choose_workers(config, VOCABULARY, SHARED, there(None)) == 1


def test_fewer_are_computed_at_once_where_memory_is_short() -> None:
    config, three = configured(micro_batch=4), TrainingPlace(workers=3)
    bytes_of_three = estimate_trainer(config, VOCABULARY, SHARED, replace(there(None), place=three)).total_bytes
    assert bytes_of_three > needed(config, 4)
    assert choose_workers(config, VOCABULARY, SHARED, there(int(bytes_of_three / (1 - MARGIN)) + 2)) == 3
    assert choose_workers(config, VOCABULARY, SHARED, there(1)) == 1


def test_the_check_is_no_part_of_which_run_it_is_and_the_micro_batch_is() -> None:
    plain, unchecked = configured(micro_batch=4), configured(micro_batch=4, memory_check=False)
    assert plain.frozen_sha256() == unchecked.frozen_sha256() != configured(micro_batch=2).frozen_sha256()


def after_an_attempt(windows: int, *, halved_to: int | None = None) -> RunState:
    end = ended(1, "oom")
    decision = replace(end.decision, micro_batch=halved_to)
    record = AttemptRecord(started=replace(started(1), micro_batch=windows), started_at=clock())
    return end_attempt(RunState(attempts=History([record])), replace(end, decision=decision), clock())


def test_what_auto_comes_to_is_kept_by_later_attempts_and_only_shrinks_when_memory_ran_out() -> None:
    training = configured(micro_batch="auto").training
    assert next_sizes(RunState(), training, 256).micro_batch == 4
    assert next_sizes(after_an_attempt(8), training, 256).micro_batch == 8
    assert next_sizes(after_an_attempt(8, halved_to=4), training, 256).micro_batch == 4


def test_an_evaluator_beside_training_counts_but_not_twice_where_it_runs_already() -> None:
    config = configured(micro_batch=8)
    memory = available_memory(config.training.model_copy(update={"device": "cpu"}), TrainerGroup())
    sizes = AttemptSizes(micro_batch=8, activation_checkpointing=False)
    assert memory.place.evaluates and estimate_trainer(config, VOCABULARY, sizes, memory).evaluator_bytes > 0
    room = memory_room(config, VOCABULARY, replace(memory, bytes=1))
    assert room is not None and room.estimate(sizes) == needed(config, 8)
    assert memory_room(config, VOCABULARY, replace(memory, bytes=None)) is None
