"""Much text is read once where the fast library encodes: the same snapshot and the same refusals as after a survey."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.data import tokenizer
from cairn.model.data.fast_encoder import FastEncoder
from cairn.tasks.data import snapshot_build
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.snapshot_build import BuildProgress, BuildStage, build_snapshot
from tests.memory_store import MemoryStore
from tests.tasks.test_snapshot_ids import CASES, FILES

REFUSED = {
    "one line too many": {"sources": ["bad.jsonl", "a.jsonl"]},
    "no text": {"sources": ["none.jsonl"], "max_rejected_fraction": 1.0},
    "nothing held out": {"sources": ["few.jsonl"]},
}
GIVEN = {name: case for name, case in CASES.items() if "tokenizer" not in case} | REFUSED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "none.jsonl").write_bytes(b'{"text": 1}\n' * 3)
    (folder / "few.jsonl").write_bytes(b'{"text": "a"}\n')
    return folder


@contextmanager
def one_pass() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_build, "FAST_FROM_BYTES", 0)
        patch.setattr(snapshot_build, "EncodingProcess", FastEncoder)
        patch.setattr(tokenizer, "_every_character", lambda: iter(()))
        yield


def outcome(data: DataConfig, folder: Path, stages: set[BuildStage]) -> str:
    def listen(progress: BuildProgress) -> None:
        stages.add(progress.stage)

    try:
        return build_snapshot(MemoryStore(), data, folder, on_progress=listen).snapshot_id
    except InvalidCorpus as refused:
        return str(refused)


@pytest.mark.parametrize("case", GIVEN)
def test_one_pass_gives_what_a_survey_and_a_pass_give(case: str, folder: Path) -> None:
    data = DataConfig.model_validate({"tokenizer": "bytes", **GIVEN[case]})
    stages = set[BuildStage]()
    expected = outcome(data, folder, stages)
    assert BuildStage.SURVEYING in stages and (case in REFUSED) == (len(expected) != 64)
    stages.clear()
    with one_pass():
        assert outcome(data, folder, stages) == expected
    assert BuildStage.SURVEYING not in stages and BuildStage.TOKENIZING in stages
