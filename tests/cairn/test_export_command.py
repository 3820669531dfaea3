"""`cairn export` on a store with a real, small model."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cairn.storage.stores.local_store import LocalStore
from tests.commands import Cairn
from tests.fabricated_run import promote
from tests.tasks.committed_model import CommittedModel, commit_model, small_configuration


@pytest.fixture
def model(store: LocalStore, tmp_path: Path) -> CommittedModel:
    """A committed, evaluated and promoted model."""
    model = commit_model(store, tmp_path, small_configuration(mask_documents=True))
    model.evaluate(2.5)
    promote(store, "bard", model.reference, loss=2.5, alias="champion")
    return model


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_an_export_lists_its_files_with_their_hashes_and_names_the_weights(
    cairn: Cairn, model: CommittedModel, tmp_path: Path
) -> None:
    ended = cairn("export", "champion", "out", "--json")
    found = json.loads(ended.out)
    assert (ended.code, found["run_id"], found["checkpoint"]["step"], found["folder"]) == (0, "bard", 7, "out")
    assert found["checkpoint"]["manifest_sha256"] == model.reference.manifest_sha256
    for name, file in found["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["transformer.wte.weight"].equal(model.state.model.wte.weight)


def test_exporting_twice_gives_equal_bytes_and_never_overwrites(
    cairn: Cairn, model: CommittedModel, tmp_path: Path
) -> None:
    first, second, again = (cairn("export", "bard@7", folder, "--json") for folder in ("out", "two", "out"))
    assert json.loads(first.out)["files"] == json.loads(second.out)["files"]
    assert again.code == 2 and "is not empty; rule" in again.err and again.out == ""


def test_the_card_says_where_the_weights_come_from_and_what_was_measured(
    cairn: Cairn, model: CommittedModel, tmp_path: Path
) -> None:
    cairn("export", "bard", "out")
    card, opened = card_of(tmp_path / "out"), model.log.state.opened
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- gpt2\n")
    assert opened is not None and "license:" not in card
    for words in (
        model.reference.manifest_sha256,
        opened.data_snapshot,
        "`text.jsonl`",
        "| tokens seen | 224 |",
        "| step | 7 of 20 |",
        "`0.1.0+abc`",
        "| `val_loss` | 2.5 |",
        "`champion` (now)",
        "it is better",
        "attends across documents",
        '"global_batch": 2',
    ):
        assert words in card, words


def test_the_card_of_a_model_trained_across_documents_warns_of_nothing(
    cairn: Cairn, store: LocalStore, tmp_path: Path
) -> None:
    commit_model(store, tmp_path, small_configuration())
    cairn("export", "bard", "out")
    card = card_of(tmp_path / "out")
    assert "attends across documents" not in card and "Nothing was measured." in card


def test_a_checkpoint_that_does_not_verify_is_not_exported(
    cairn: Cairn, model: CommittedModel, store: LocalStore, tmp_path: Path
) -> None:
    key = f"{model.reference.prefix}/weights-00001-of-00001.safetensors"
    store.write(key, store.read(key)[:-1] + b"?")
    ended = cairn("export", "bard", "out")
    assert ended.code == 5 and key in ended.err and not (tmp_path / "out").exists()


def test_the_cards_code_prints_text_of_the_model(
    cairn: Cairn,
    model: CommittedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cairn("export", "bard", "out")
    code = re.search(r"```python\n(.*?)```", card_of(tmp_path / "out"), re.DOTALL)
    assert code is not None
    lines = code[1].replace("path/to/this/folder", str(tmp_path / "out")).replace("=20", "=8")
    exec(compile(lines, "card", "exec"), {})
    assert capsys.readouterr().out.startswith("The ")
