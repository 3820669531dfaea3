"""`cairn export` on a store with a real, small model."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.trainer.initial_weights import WeightsSource, keep_source
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


def begun_from(store: LocalStore, folder: Path, **changes: Any) -> None:
    """A model that was trained from somebody's weights."""
    known: dict[str, Any] = {"name": "theirs", "licence": "mit", "files": {"model.safetensors": "5" * 64}}
    source = WeightsSource(**{**known, "documents": {}, **changes})
    commit_model(store, folder, small_configuration(), initial_source_sha256=keep_source(store, source))


def test_the_card_names_the_base_model_its_hash_and_licence(cairn: Cairn, store: LocalStore, tmp_path: Path) -> None:
    begun_from(store, tmp_path)
    cairn("export", "bard", "out")
    card = card_of(tmp_path / "out")
    assert 'base_model: "theirs"\nlicense: "mit"\n' in card and "| base model | `theirs` |" in card
    assert f"`model.safetensors`, sha256 | `{'5' * 64}`" in card and "| licence of the base model | `mit` |" in card


def test_a_base_model_s_words_stay_in_their_place_of_the_card(cairn: Cairn, store: LocalStore, tmp_path: Path) -> None:
    begun_from(store, tmp_path, name="a\n---\n# X", licence="`|\n\n# Y", files={"x.safetensors": "|\n# Z"})
    assert cairn("export", "bard", "out").code == 0
    assert not {"# X", "# Y", "# Z", "---"} & {*card_of(tmp_path / "out").partition("\n---\n")[2].splitlines()}


def test_a_fork_s_card_names_the_base_model_too(cairn: Cairn, store: LocalStore, tmp_path: Path) -> None:
    begun_from(store, tmp_path)
    assert cairn("fork", "bard", "twin").code == 0
    opened, forked = (RunLog(store, run).refresh().opened for run in ("bard", "twin"))
    assert opened is not None and forked is not None
    assert opened.initial_source_sha256 == forked.initial_source_sha256 is not None


@pytest.mark.parametrize(
    "documents",
    [
        {"config.json": '{"model_type": "gpt2", "n_layer": 99, "vocab_size": 301}'},
        {"config.json": "[]"},
        {"tokenizer_config.json": "{"},
    ],
)
def test_documents_of_a_store_that_do_not_fit_the_weights_are_not_exported(
    cairn: Cairn, store: LocalStore, tmp_path: Path, documents: dict[str, str]
) -> None:
    begun_from(store, tmp_path, documents=documents)
    ended = cairn("export", "bard", "out")
    assert ended.code == 2 and not (tmp_path / "out").exists()


def test_only_the_known_documents_of_a_store_are_exported_and_none_names_code(
    cairn: Cairn, store: LocalStore, tmp_path: Path
) -> None:
    code = '{"auto_map": {"AutoTokenizer": ["code.T", null]}, "a": 1}'
    begun_from(store, tmp_path, documents={"../evil.json": "{}", "code.py": "1", "tokenizer_config.json": code})
    assert cairn("export", "bard", "out").code == 0
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names and not (tmp_path / "evil.json").exists()
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"a": 1}


def test_a_checkpoint_that_does_not_verify_is_not_exported(
    cairn: Cairn, model: CommittedModel, store: LocalStore, tmp_path: Path
) -> None:
    key = f"{model.reference.prefix}/weights-00001-of-00001.safetensors"
    store.write(key, store.read(key)[:-1] + b"?")
    ended = cairn("export", "bard", "out")
    assert ended.code == 5 and key in ended.err and not (tmp_path / "out").exists()


@pytest.mark.xdist_group("transformers")  # importing it takes seconds
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
