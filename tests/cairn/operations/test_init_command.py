"""`cairn init` looks at a text and at the machine, and writes a configuration that `cairn train` takes as it is."""

import gzip
import json
import shlex
from pathlib import Path

import pytest

from cairn.operations import first_configuration
from cairn.operations.first_configuration import FirstConfiguration, write_first_configuration
from cairn.tasks.configuration.configuration_source import load_configuration
from cairn.tasks.errors import InvalidConfiguration
from tests.commands import ROOT, Cairn
from tests.text.shakespeare import TINY_SHAKESPEARE

PLAN = ("--dry-run", "--json", "--set", "training.precision=fp32", "--set", "training.kernels=stock")
"""Nothing of the machine has to be measured for this plan."""
TEXT = TINY_SHAKESPEARE.read_text(encoding="utf-8")


def write(folder: Path, *names: str, text: str = TEXT) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = text.encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


@pytest.mark.parametrize(
    ("files", "line", "written"),
    [
        (["book.txt"], "book.txt", "book.toml"),
        (["texts/a.txt", "texts/b.md"], "texts", "texts.toml"),
        (["texts/a.txt", "texts/deep/b.txt"], "texts/", "texts.toml"),
        (["texts/a.txt.gz"], "texts", "texts.toml"),
        (["texts/A.TXT"], "texts", "texts.toml"),
        (["far/texts/a.txt"], "far/texts", "far/texts.toml"),
        (["my [first] book.txt"], "'my [first] book.txt'", "my-first-book.toml"),
        (["my [first] texts/a.txt"], "'my [first] texts'", "my-first-texts.toml"),
        (["no suffix"], "'no suffix'", "no-suffix.toml"),
    ],
)
def test_the_configuration_beside_a_text_is_taken_as_it_is(
    cairn: Cairn, tmp_path: Path, files: list[str], line: str, written: str
) -> None:
    write(tmp_path, *files)
    made = cairn("init", *shlex.split(line))
    assert made.code == 0 and made.out.splitlines()[-1] == f"train it: cairn train {written}"
    planned = json.loads(cairn("train", written, *PLAN).out)
    assert (planned["run_id"], planned["action"]) == (Path(written).stem, "open")
    assert len(planned["data"]["sources"]) == len(files)


def test_without_a_name_the_text_is_that_of_this_folder(cairn: Cairn, tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    made = json.loads(cairn("init", "--json").out)
    assert made["sources"] == ["**/*.txt"] and (tmp_path / made["path"]).exists()


def test_nothing_is_overwritten(cairn: Cairn, tmp_path: Path) -> None:
    write(tmp_path, "book.txt")
    (tmp_path / "book.toml").write_text("mine")
    refused = cairn("init", "book.txt")
    assert refused.code == 2 and "book.toml: cannot be made: File exists; rule: nothing is overwritten" in refused.err
    assert (tmp_path / "book.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gone", "gone: no such file or folder"),
        ("empty", "empty: no text in it; rule: a .txt"),
        ("short.txt", "short.txt: 12 bytes of text; rule: at least 1,000"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(cairn: Cairn, tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"\x89PNG")
    write(tmp_path, "short.txt", text="twelve bytes")
    refused = cairn("init", line)
    assert refused.code == 2 and words in refused.err and len(refused.err.splitlines()) == 1


def test_of_text_and_records_in_a_folder_the_text_is_taken(tmp_path: Path) -> None:
    write(tmp_path, "texts/a.txt", "texts/meta.json", "texts/.hidden/b.md")
    assert made_of(tmp_path / "texts").sources == ("texts/**/*.txt",)


def made_of(text: Path, *, cores: int = 2, on_gpu: bool = False) -> FirstConfiguration:
    return write_first_configuration(text, cores=cores, on_gpu=on_gpu)


@pytest.mark.parametrize("cores", [1, 2, 8, 64])
@pytest.mark.parametrize("times", [1, 3, 12, 100])
def test_every_text_is_trained_on_in_five_minutes_at_the_most(tmp_path: Path, cores: int, times: int) -> None:
    write(tmp_path, "book.txt", text=TEXT * times)
    made = made_of(tmp_path / "book.txt", cores=cores)
    assert made.seconds <= 300
    config = load_configuration(tmp_path / "book.toml", overrides=(), environment={})
    assert config.training.steps == made.steps and config.model.n_layer == (2 if times == 1 else 4)


def test_more_text_is_trained_on_longer_until_the_minutes_are_full(tmp_path: Path) -> None:
    steps = []
    for times in (1, 2, 6, 12):
        write(tmp_path, f"{times}.txt", text=TEXT * times)
        steps.append(made_of(tmp_path / f"{times}.txt", cores=8).steps)
    assert steps[1:] == sorted(steps[1:]) and steps[-1] > steps[1]


def test_a_gpu_gets_a_larger_network(tmp_path: Path) -> None:
    write(tmp_path, "book.txt", text=TEXT * 12)
    made_of(tmp_path / "book.txt", on_gpu=True)
    config = load_configuration(tmp_path / "book.toml", overrides=(), environment={})
    assert (config.model.n_layer, config.model.n_embd) == (6, 384)


def test_the_quickstarts_pace_is_the_one_that_a_core_is_taken_for(tmp_path: Path) -> None:
    ours = load_configuration(ROOT / "deployments" / "quickstart.toml", overrides=(), environment={})
    write(tmp_path, "book.txt", text=TEXT * 12)
    made_of(tmp_path / "book.txt")
    theirs = load_configuration(tmp_path / "book.toml", overrides=(), environment={})
    assert (theirs.model.n_layer, theirs.model.n_embd) == (ours.model.n_layer, ours.model.n_embd)
    said = "step 69/500 (13 %) · loss 3.992 · 10,635 tokens/s"
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")  # on two shared cores
    assert first_configuration._CORE_TOKENS_PER_SECOND * 2 <= 10_635


def test_a_text_that_is_no_text_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x89PNG" * 1000)
    with pytest.raises(InvalidConfiguration):
        made_of(tmp_path / "a.txt")
    assert not (tmp_path / "a.toml").exists()


@pytest.mark.parametrize("name", ["shakespeare", "tiny-shakespeare", "fast-shakespeare", "wide-shakespeare"])
def test_the_offered_configurations_find_their_text_from_any_folder(cairn: Cairn, name: str) -> None:
    planned = json.loads(cairn("train", name, *PLAN).out)
    (size,) = planned["data"]["sources"].values()
    assert size < 450_000 and planned["data"]["train_bytes"] == 1_003_854


@pytest.mark.slow
def test_the_estimate_is_near_what_this_machine_trains(cairn_process: Cairn, tmp_path: Path) -> None:
    write(tmp_path, "book.txt", text=TEXT * 12)
    made = json.loads(cairn_process("init", "book.txt", "--json").out)
    assert cairn_process("train", "book.toml", "--set", "training.steps=40", "--run-id", "short").code == 0
    (receipt,) = json.loads(cairn_process("attempts", "short", "--json").out)
    a_step = receipt["gpu_seconds"] / 40
    assert made["steps"] * a_step < 4 * made["seconds"], "a busy machine is three times as slow"
