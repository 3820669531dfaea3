"""`cairn replay`: what was committed is computed again from the store alone and comes to the same bits, or is named."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.operations.unrecorded_plan import Segment, find_obstacle
from cairn.operations.unrecorded_training import replay_run
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.machine.placement import this_placement
from tests.cairn.trained_run import RUN, TrainedRun
from tests.commands import Ended, run_here
from tests.entries import started

FLIPPED_AFTER = 5


@pytest.fixture(autouse=True, scope="module")
def same_threads() -> Iterator[None]:
    """A replay takes the threads of the attempt, for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path: Path) -> TrainedRun:
    """A run that was only opened."""
    return TrainedRun(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run of one attempt, committed at the steps 2, 4, 6 and 8."""
    run = TrainedRun(tmp_path_factory.mktemp("undisturbed"))
    run.attempt(2, 4, 6, 8)
    return run


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run committed at the steps 3, 7 and 8, with a bit flipped after step 5."""
    run = TrainedRun(tmp_path_factory.mktemp("flipped"))
    run.attempt(3, 7, 8, faults=f"sdc@{FLIPPED_AFTER}")
    return run


def replay(run: TrainedRun, *arguments: str) -> Ended:
    """Replay it by the command."""
    return run_here(("replay", RUN, *arguments), run.world.folder, {})


def replayed(run: TrainedRun, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Replay it and return what the command says."""
    ended = replay(run, "--json", *arguments)
    assert ended.code == code, ended.err
    document: dict[str, Any] = json.loads(ended.out)
    return document


def outcomes(document: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [(item["from_step"], item["end"]["step"], item["outcome"]) for item in document["segments"]]


def stored(run: TrainedRun) -> dict[str, tuple[int, bytes]]:
    root = run.world.folder / "store"
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


def test_every_segment_of_an_undisturbed_run_is_equal_and_the_store_is_left_as_it_was(undisturbed: TrainedRun) -> None:
    before = stored(undisturbed)
    found = outcomes(replayed(undisturbed))
    assert found == [(0, 2, "equal"), (2, 4, "equal"), (4, 6, "equal"), (6, 8, "equal")]
    assert stored(undisturbed) == before


def test_a_build_of_torch_that_names_itself_otherwise_than_its_package_is_the_same_one(
    undisturbed: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__}.other")  # as the build for GPUs does: +cu130
    assert outcomes(replayed(undisturbed, "--to", "2")) == [(0, 2, "equal")]


def test_attempts_that_were_lost_recomputed_activations_or_had_smaller_micro_batches_are_equal(run: TrainedRun) -> None:
    run.attempt(2, dies_at=3)
    run.attempt(4, activation_checkpointing=True)
    run.attempt(6, 8, micro_batch=2, activation_checkpointing=True)
    assert outcomes(replayed(run)) == [(0, 2, "equal"), (2, 4, "equal"), (4, 6, "equal"), (6, 8, "equal")]


def test_windows_are_left_out_from_the_attempt_on_that_left_them_out(run: TrainedRun) -> None:
    run.attempt(2, quarantines=range(20))
    run.attempt(4, quarantines=range(20, 30))
    run.attempt(6)
    assert outcomes(replayed(run)) == [(0, 2, "equal"), (2, 4, "equal"), (4, 6, "equal")]


def test_a_flipped_bit_is_named_by_its_segment_and_step(flipped: TrainedRun) -> None:
    document = replayed(flipped, code=5)
    assert outcomes(document) == [(0, 3, "equal"), (3, 7, "different"), (7, 8, "equal")]
    found = document["segments"][1]
    assert (found["last_equal_step"], found["first_different_step"]) == (FLIPPED_AFTER, FLIPPED_AFTER + 1)


def test_what_differs_is_said_on_stderr_where_stdout_is_json(flipped: TrainedRun) -> None:
    said = replay(flipped, "--json", "--from", "3", "--to", "7").err
    assert said.startswith(f"cairn: run {RUN}, steps 3 to 7: different: the record of step {FLIPPED_AFTER + 1} differs")


def test_a_step_without_a_record_is_passed_over(run: TrainedRun) -> None:
    run.attempt(3, 7, faults=f"sdc@{FLIPPED_AFTER}")
    [records] = (run.world.folder / "store").glob(f"runs/{RUN}/steps/*.jsonl")
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(line for line in lines if json.loads(line)["step"] != FLIPPED_AFTER))
    found = replayed(run, "--from", "3", code=5)["segments"][0]
    assert (found["last_equal_step"], found["first_different_step"]) == (FLIPPED_AFTER - 1, FLIPPED_AFTER + 1)


def test_a_bit_that_was_flipped_after_the_last_record_of_a_segment_is_named_too(run: TrainedRun) -> None:
    run.attempt(1, 3, faults="sdc@3")
    found = replayed(run, code=5)["segments"][1]
    assert (found["last_equal_step"], found["first_different_step"]) == (3, None)
    assert "after the record of step 3" in found["why"]


def test_a_start_that_retention_removed_is_reached_from_an_earlier_one(run: TrainedRun) -> None:
    run.attempt(2, 4)
    run.attempt(6, 8)
    run.supersede(2, 4)
    assert outcomes(replayed(run)) == [(0, 2, "equal"), (2, 4, "equal"), (4, 6, "equal"), (6, 8, "equal")]


def test_without_an_earlier_one_it_is_skipped_and_said(run: TrainedRun) -> None:
    run.attempt(2, 4, 6)
    run.supersede(2)
    document = replayed(run, "--from", "2")
    assert outcomes(document) == [(2, 4, "skipped"), (4, 6, "equal")]
    assert "retention has removed its start, the checkpoint of step 2" in document["segments"][0]["why"]


def test_a_start_that_retention_removes_meanwhile_is_skipped_and_no_damage(run: TrainedRun) -> None:
    run.attempt(2, 4)

    def sweep_then_all(segments: Sequence[Segment]) -> Sequence[Segment]:
        run.supersede(2)
        for key in run.world.store.keys(segments[0].end.prefix):
            run.world.store.delete(key)
        return segments

    log = RunLog(run.world.store, RUN)
    log.refresh()
    found = replay_run(log, sweep_then_all, on_segment=lambda done: None)
    assert [item.outcome for item in found.segments] == ["equal", "skipped"]
    assert found.segments[1].why.endswith("is superseded by now")


def test_only_segments_with_the_steps_asked_for_are_computed(undisturbed: TrainedRun) -> None:
    assert outcomes(replayed(undisturbed, "--from", "3", "--to", "5")) == [(2, 4, "equal"), (4, 6, "equal")]


def test_a_sample_has_at_least_one_segment_and_is_the_same_again(undisturbed: TrainedRun) -> None:
    first, again = (outcomes(replayed(undisturbed, "--sample", "1%")) for _ in range(2))
    assert first == again and len(first) == 1 and len(outcomes(replayed(undisturbed, "--sample", "51%"))) == 3


@pytest.mark.parametrize(
    ("changes", "training", "said"),
    [
        ({"placement": this_placement(device="cuda:0", threads=1)}, {}, "trained on cuda:0"),
        (
            {"placement": this_placement(device="cpu", threads=2, world_size=2)},
            {"parallel": "fsdp", "processes": 2},
            "2 sharded processes",
        ),
        ({"versions": {"torch": "1.0"}}, {}, "trained with torch 1.0"),
        ({}, {"compile": True}, "training.compile"),
    ],
    ids=["device", "shards", "version", "compiled"],
)
def test_what_promises_no_equal_bits_here_is_skipped_and_said(
    run: TrainedRun, changes: dict[str, Any], training: dict[str, Any], said: str
) -> None:
    run.attempt(1, training=training, **changes)
    [found] = replayed(run, code=2)["segments"]
    assert found["outcome"] == "skipped" and said in found["why"]


def test_a_run_on_two_replicated_processes_is_computed_again_by_one(run: TrainedRun) -> None:
    run.attempt(2, placement=this_placement(device="cpu", threads=1, world_size=2), training={"processes": 2})
    assert outcomes(replayed(run)) == [(0, 2, "equal")]


def test_a_start_that_does_not_verify_is_unreadable_and_the_others_are_replayed(run: TrainedRun) -> None:
    run.attempt(2, 4, 6)
    [shard] = (run.world.folder / "store").glob(f"runs/{RUN}/checkpoints/step-00000002-*/weights-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    document = replayed(run, code=5)
    assert outcomes(document) == [(0, 2, "equal"), (2, 4, "unreadable"), (4, 6, "equal")]


def test_people_get_a_table_and_the_sum(undisturbed: TrainedRun) -> None:
    said = replay(undisturbed, "--to", "2").out.splitlines()
    assert "0 to 2" in said[1] and said[-1] == f"run {RUN}: 4 committed segments, 1 equal"


def test_what_was_compiled_on_a_gpu_is_computed_again_on_one(run: TrainedRun) -> None:
    config = run.config.model_copy(update={"training": run.config.training.model_copy(update={"compile": True})})
    gpu, cpu = (
        started(1, placement=this_placement(device=device, threads=1), versions={"torch": "2"})
        for device in ("cuda:0", "cpu")
    )
    assert find_obstacle(gpu, config, torch_version="2", has_cuda=True) == ""
    assert "its bits are not promised" in find_obstacle(cpu, config, torch_version="2", has_cuda=True)
