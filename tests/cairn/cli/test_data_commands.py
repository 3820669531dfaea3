import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.reports.errors import RunNotFound
from cairn.reports.queries.data_summary import DataSummary, WindowChoice, find_snapshot, summarize_data
from cairn.storage.logs.run_log import RunLog
from cairn.storage.snapshots.data_snapshot import open_snapshot
from cairn.storage.snapshots.snapshot_manifest import SplitName
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.data.snapshot_lookup import weighted_components
from tests.commands import LIST_IMPORTS, Cairn, Ended, run_python
from tests.entries import opened, writer
from tests.fabricated_run import FabricatedRun

pytestmark = pytest.mark.usefixtures("forked_parsers")
BLOCK = 64
PLAIN = DataConfig(sources=("*.txt",), tokenizer="bytes", val_fraction=0.3, split="documents")
WEIGHTED = DataConfig(sources=("0*.txt", "1*.txt", "2*.txt"), weights=(1, 2, 5), tokenizer="bytes", val_fraction=0.3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of one document each, some with letters of several bytes; nobody changes them."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        lines = (f"Zeile {number}.{line}: für Ünïcode und alles übrige." for line in range(number % 7 + 1))
        (folder / f"{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def built(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A store with the snapshots of the tests, each built once."""
    folder = tmp_path_factory.mktemp("built")
    configs = {"plain": PLAIN, "weighted": WEIGHTED}
    return folder, {
        name: build_snapshot(LocalStore(folder / name), config, corpus).snapshot_id for name, config in configs.items()
    }


@pytest.fixture
def snapshot_id(store: LocalStore, built: tuple[Path, dict[str, str]]) -> str:
    return copied("plain", built, store)


def copied(name: str, built: tuple[Path, dict[str, str]], store: LocalStore) -> str:
    shutil.copytree(built[0] / name, store.url.removeprefix("file://"), dirs_exist_ok=True)
    return built[1][name]


def look(store: LocalStore, snapshot_id: str, tmp_path: Path, **choice: Any) -> DataSummary:
    return summarize_data(
        store, snapshot_id, WindowChoice(**{"block_size": BLOCK} | choice), cache_dir=tmp_path / "cache"
    )


def test_sizes_and_sources_are_those_of_the_corpus(
    store: LocalStore, snapshot_id: str, corpus: Path, tmp_path: Path
) -> None:
    view = look(store, snapshot_id, tmp_path)
    text_bytes = sum(path.stat().st_size for path in corpus.iterdir())
    manifest = view.manifest
    sizes = (manifest.splits.train, manifest.splits.val)
    assert sum(split.bytes for split in sizes) == text_bytes
    assert sum(split.documents for split in sizes) == len(manifest.sources) == 40
    assert (manifest.vocab_size, manifest.end_of_text_id, manifest.rejected) == (257, 256, ())


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_token_of_the_outer_and_the_middle_windows_leads_back_to_its_source_file(
    store: LocalStore, snapshot_id: str, corpus: Path, tmp_path: Path, split: SplitName
) -> None:
    """With bytes as tokens a window is its documents' bytes, each followed by one end of text."""
    by_name = {path.name: path for path in corpus.iterdir()}
    count = look(store, snapshot_id, tmp_path).window_counts[split]
    for window in sorted({0, count // 2, count - 1}):  # each look at the index is a process of its own
        (view,) = look(store, snapshot_id, tmp_path, window=window, split=split).windows
        expected = ""
        content = b""
        for place in view.documents:
            document, first = place.row, max(0, view.first_token - place.first_token)
            source = by_name[Path(document.source).name].read_bytes()
            text = source[document.offset_bytes : document.offset_bytes + document.bytes]
            content += text[first:] + b"\0"
        expected = content[:BLOCK].decode("utf-8", "replace").replace("\0", "<|endoftext|>")
        assert view.text.strip("\ufffd") == expected.strip("\ufffd")


def test_a_few_windows_of_both_splits_are_shown_unless_one_is_asked_for(
    store: LocalStore, snapshot_id: str, tmp_path: Path
) -> None:
    view = look(store, snapshot_id, tmp_path)
    last = view.window_counts["train"] - 1
    assert [(shown.split, shown.window) for shown in view.windows] == [
        ("train", 0),
        ("train", (last + 1) // 2),
        ("train", last),
        ("val", 0),
    ]


def test_the_beginning_of_an_id_is_enough(store: LocalStore, snapshot_id: str, tmp_path: Path) -> None:
    assert look(store, snapshot_id[:8], tmp_path).snapshot_id == snapshot_id


def test_the_verb_answers_people_and_scripts(cairn: Cairn, snapshot_id: str) -> None:
    people, script = cairn("data", snapshot_id[:12]), cairn("data", snapshot_id, "--json")
    assert (people.code, script.code, script.err) == (0, 0, "")
    assert "00.txt" in people.out and "train window 0, tokens 0 to 255, from" in people.out
    assert json.loads(script.out)["snapshot_id"] == snapshot_id


def test_text_that_would_steer_the_terminal_is_shown_harmless(cairn: Cairn, store: LocalStore, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"{number}\x1b[2J" * 20)
    config = DataConfig(sources=("*.txt",), tokenizer="bytes", val_fraction=0.5)
    shown = cairn("data", build_snapshot(store, config, tmp_path).snapshot_id)
    assert (shown.code, "\ufffd[2J" in shown.out, "\x1b" in shown.out) == (0, True, False)


def test_the_verb_needs_neither_torch_nor_the_orchestrator(snapshot_id: str, tmp_path: Path) -> None:
    words = ("-c", LIST_IMPORTS, "data", snapshot_id, "--window", "0")
    imported = set(run_python(words, tmp_path, {}).err.split())
    assert "cairn.reports.queries.data_summary" in imported and not {"torch", "prefect", "fsspec"} & imported


def test_a_window_that_is_not_there_is_refused_with_those_there_are(cairn: Cairn, snapshot_id: str) -> None:
    ended = cairn("data", snapshot_id, "--window", "999999", "--block-size", "64")
    assert ended.code == 2 and "train has windows 0 to" in ended.err


def test_a_run_names_its_snapshot_and_its_window_size(bard: FabricatedRun, store: LocalStore) -> None:
    found = find_snapshot(store, "bard")
    assert (found.snapshot_id, found.run_id, found.block_size) == ("d" * 64, "bard", 8)


@pytest.fixture
def weighted_run(store: LocalStore, built: tuple[Path, dict[str, str]]) -> str:
    """A run whose sources are mixed by weight, opened and no more."""
    snapshot_id = copied("weighted", built, store)
    config = {"data": WEIGHTED.model_dump(mode="json"), "model": {"block_size": BLOCK}}
    body = opened("mixed", config=config, data_snapshot=snapshot_id)
    RunLog(store, "mixed").append(lambda state: body, writer=writer())
    return snapshot_id


def test_what_is_drawn_together_is_shown_with_a_runs_weights(
    store: LocalStore, weighted_run: str, tmp_path: Path
) -> None:
    view = look(store, "mixed", tmp_path)
    shown = [(item.group.name, item.group.sources, item.weight, item.share) for item in view.groups]
    assert shown == [("0*.txt", 10, 1.0, 0.125), ("1*.txt", 10, 2.0, 0.25), ("2*.txt", 10, 5.0, 0.625)]
    components = weighted_components(open_snapshot(store, weighted_run, tmp_path / "cache").manifest, WEIGHTED, BLOCK)
    assert [group.windows for group in view.groups] == [part.window_count for part in components]
    assert [group.weight for group in look(store, weighted_run, tmp_path).groups] == [None] * 3
    assert sum(item.group.train_tokens for item in view.groups) == view.manifest.splits.train.tokens


def test_a_window_is_shown_as_drawn_exactly_where_a_component_has_it(
    store: LocalStore, weighted_run: str, tmp_path: Path
) -> None:
    components = weighted_components(open_snapshot(store, weighted_run, tmp_path / "cache").manifest, WEIGHTED, BLOCK)
    drawn = {window for part in components for window in range(part.first_window, part.end_window)}
    middle = components[1]
    edges = {edge + side for edge in (middle.first_window, middle.end_window) for side in (-1, 0)}
    count = look(store, "mixed", tmp_path).window_counts["train"]
    assert len(drawn) < count
    for window in sorted(edges & set(range(count))):
        (shown,) = look(store, "mixed", tmp_path, window=window).windows
        assert (shown.is_drawn, len(shown.groups) == 1) == (window in drawn, window in drawn)
        assert {place.row.source[0] for place in shown.documents} <= {name[0] for name in shown.groups}


def test_what_a_run_draws_from_each_stage_on_is_shown(
    cairn: Cairn, store: LocalStore, weighted_run: str, tmp_path: Path
) -> None:
    data = {**WEIGHTED.model_dump(mode="json"), "stages": [{"step": 800, "weights": [1, 0, 3]}]}
    body = replace(RunLog(store, "mixed").refresh().opened, run_id="staged", config={"data": data})
    RunLog(store, "staged").append(lambda state: body, writer=writer())
    shown = " ".join(cairn("data", "staged").out.split())
    assert (
        "from step 0 12.50% 0*.txt, 25.00% 1*.txt, 62.50% 2*.txt; from step 800 25.00% 0*.txt, 75.00% 2*.txt" in shown
    )
    assert "share of draws before step 800" in shown
    stages = json.loads(cairn("data", "staged", "--json").out)["mixture"]
    assert [(stage["from_step"], stage["shares"]["2*.txt"]) for stage in stages] == [(0, 0.625), (800, 0.75)]


def test_people_are_told_of_weights_and_of_a_window_nobody_draws(
    cairn: Cairn, store: LocalStore, weighted_run: str, tmp_path: Path
) -> None:
    first = look(store, "mixed", tmp_path).groups[0].group.train_tokens // BLOCK
    shown = cairn("data", "mixed", "--window", str(first)).out
    assert "share of draws" in shown and "62.50%" in shown
    assert "it crosses the border of 0*.txt and 1*.txt: with weights no step draws it" in shown


def test_a_beginning_that_several_ids_have_is_refused_with_them(store: LocalStore) -> None:
    for end in "ab":
        store.write(f"data/{'c' * 63}{end}/snapshot.json", b"")
    with pytest.raises(RunNotFound, match="2 snapshots begin so"):
        find_snapshot(store, "cccccccc")


def test_a_damaged_shard_is_never_shown(cairn: Cairn, snapshot_id: str, tmp_path: Path) -> None:
    shard = tmp_path / "store" / "data" / snapshot_id / "train-00000.arrow"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    ended = cairn("data", snapshot_id)
    assert ended.code == 5 and f"data/{snapshot_id}/train-00000.arrow: sha256 is" in ended.err


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(Tokenizer.bytes().json)
    return path


def test_exported_and_imported_again_the_tokens_are_the_same(
    cairn: Cairn, snapshot_id: str, tokenizer_file: Path, tmp_path: Path
) -> None:
    names = ("train_000000.bin", "val_000000.bin")
    first, second = tmp_path / "1", tmp_path / "2"
    assert cairn("export-tokens", snapshot_id, str(first), "--format", "llm.c").code == 0
    sides = ("--train", str(first / names[0]), "--val", str(first / names[1]))
    made = cairn("import-tokens", *sides, "--tokenizer", str(tokenizer_file), "--json")
    assert (made.code, made.err) == (0, "")
    assert cairn("export-tokens", json.loads(made.out)["snapshot_id"], str(second), "--format", "llm.c").code == 0
    assert [(first / name).read_bytes() for name in names] == [(second / name).read_bytes() for name in names]


def import_ids(cairn: Cairn, folder: Path, *options: str, train: int = 0, val: int = 5000, width: int = 2) -> Ended:
    """Import a thousand ids a split, which go up from these first ones."""
    for name, first in (("train", train), ("val", val)):
        np.arange(first, first + 1000, dtype=f"<u{width}").tofile(folder / f"{name}.bin")
    return cairn("import-tokens", "--train", "train.bin", "--val", "val.bin", *options)


def test_ids_of_an_unknown_tokenizer_are_shown_as_numbers(cairn: Cairn, tmp_path: Path) -> None:
    made = import_ids(cairn, tmp_path, "--vocab-size", "50257")
    snapshot_id = next(line.split()[1] for line in made.out.splitlines() if line.startswith("snapshot "))
    assert "980 981 982" in cairn("data", snapshot_id, "--window", "98", "--block-size", "10").out


def test_exported_token_files_are_listed_with_their_tokens(cairn: Cairn, tmp_path: Path) -> None:
    made = import_ids(cairn, tmp_path, "--vocab-size", "50257", "--json")
    written = json.loads(cairn("export-tokens", json.loads(made.out)["snapshot_id"], "out", "--json").out)
    assert written == [{"path": f"out/{n}.bin", "tokens": 1000, "dtype": "uint16"} for n in ("train", "val")]


def test_token_files_where_no_folder_can_be_are_refused_in_one_line(cairn: Cairn, tmp_path: Path) -> None:
    made = import_ids(cairn, tmp_path, "--vocab-size", "50257", "--json")
    ended = cairn("export-tokens", json.loads(made.out)["snapshot_id"], "train.bin/out")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "train.bin/out: cannot be written: Not a directory" in ended.err


def test_the_type_of_wide_tokens_without_a_header_is_an_option(cairn: Cairn, tmp_path: Path) -> None:
    wide = {"train": 100_000, "val": 500, "width": 4}
    refused = import_ids(cairn, tmp_path, "--vocab-size", "128256", **wide)
    assert refused.code == 2 and "Say the width that it has: --dtype uint32" in refused.err
    taken = import_ids(cairn, tmp_path, "--vocab-size", "128256", "--dtype", "uint32", **wide)
    assert "train  1,000 tokens" in taken.out
