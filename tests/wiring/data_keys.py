"""The keys of the data, each seen in the snapshot that a run is opened with."""

import json

import msgspec
import pytest

from cairn.storage.snapshots.data_snapshot import read_manifest
from cairn.storage.snapshots.snapshot_manifest import SnapshotManifest
from cairn.tasks.data.document import InvalidCorpus
from tests.tasks.corpus_files import shaped
from tests.tasks.tokenizer_kinds import learned
from tests.wiring.bench import Bench
from tests.wiring.flow_in_process import TEXT, FlowWorld
from tests.wiring.key_table import acts


def built(bench: Bench, *overrides: str) -> SnapshotManifest:
    """Return the manifest of the snapshot that a run with these settings is opened with."""
    with bench.flow.opened(*overrides) as run:
        return read_manifest(run.log.store, run.origin.snapshot_id)


def documents(manifest: SnapshotManifest) -> int:
    return manifest.split("train").documents + manifest.split("val").documents


@acts("data.sources", "data.text_field")
def the_text_of_other_files(bench: Bench) -> None:
    lines = [json.dumps({"body": f"line {number} of its body", "text": "x"}) for number in range(80)]
    (bench.flow.folder / "lines.jsonl").write_text("\n".join(lines))
    manifest = built(bench, 'data.sources=["lines.jsonl"]', "data.text_field=body")
    assert [source.name for source in manifest.sources] == ["lines.jsonl"] and documents(manifest) == 80
    assert manifest.split("train").bytes + manifest.split("val").bytes == sum(
        len(json.loads(line)["body"]) for line in lines
    )


@acts("data.val_sources", "data.exclude")
def files_that_are_held_out_or_left_out(bench: Bench) -> None:
    for name in ("train", "held", "gone"):
        (bench.flow.folder / f"{name}.md").write_text(f"{TEXT} {name}")
    manifest = built(bench, 'data.sources=["*.md"]', 'data.val_sources=["held.md"]', 'data.exclude=["gone.*"]')
    assert [source.name for source in manifest.sources] == ["held.md", "train.md"]
    assert manifest.split("val").bytes == len(f"{TEXT} held".encode())


@acts("data.format", "data.separator")
def what_a_file_holds_and_what_divides_it(bench: Bench) -> None:
    (bench.flow.folder / "lines.jsonl").write_text("\n".join(f'{{"text": "{n}"}}\n---' for n in range(80)))
    manifest = built(bench, 'data.sources=["lines.jsonl"]', "data.format=text", "data.separator=---")
    assert documents(manifest) == 80
    assert manifest.split("train").bytes + manifest.split("val").bytes == sum(
        len(f'{{"text": "{n}"}}') for n in range(80)
    )


@acts("data.val_fraction")
def the_share_that_is_held_out(bench: Bench) -> None:
    manifest = built(bench, "data.val_fraction=0.8")
    assert manifest.split("val").bytes > 2 * manifest.split("train").bytes


@acts("data.tokenizer", "data.tokenizer_bytes")
def what_a_tokenizer_learns_from(bench: Bench) -> None:
    """A tokenizer of a little of the text has other tokens than one of all of it; both have as many as asked."""

    def tokenizer(name: str, *overrides: str) -> tuple[int, str]:
        folder = bench.flow.folder / name
        folder.mkdir()
        world = FlowWorld(folder)
        texts = [*TEXT.split("\n\n"), *(f"zzyzx {number} qqvq" for number in range(60))]
        (folder / "lines.jsonl").write_bytes(shaped(texts, "jsonl"))
        with world.opened("data.tokenizer=bpe:290", 'data.sources=["lines.jsonl"]', *overrides) as run:
            manifest = read_manifest(run.log.store, run.origin.snapshot_id)
        (found,) = [item.sha256 for item in manifest.objects if item.key == "tokenizer.json"]
        return manifest.vocab_size, found

    (whole_size, whole), (part_size, part) = tokenizer("whole"), tokenizer("part", "data.tokenizer_bytes=900")
    assert (whole_size, part_size) == (290, 290) and whole != part


@acts("data.end_of_text")
def which_token_ends_a_document(bench: Bench) -> None:
    (bench.flow.folder / "t.json").write_text(json.dumps(learned("<EOT>")))
    assert built(bench, "data.tokenizer=t.json", "data.end_of_text=<EOT>").end_of_text_id == 0


@acts("data.split", "data.max_document_bytes")
def what_of_a_text_is_held_out_and_where_it_is_cut(bench: Bench) -> None:
    assert documents(built(bench, "data.split=documents", "data.max_document_bytes=100")) > 2


@acts("data.max_rejected_fraction", "data.deduplicate")
def documents_left_out(bench: Bench) -> None:
    lines = shaped([f"line {number % 60}" for number in range(80)], "jsonl")
    (bench.flow.folder / "lines.jsonl").write_bytes(lines + b"no JSON")
    source = 'data.sources=["lines.jsonl"]'
    with pytest.raises(InvalidCorpus):
        built(bench, source, "data.max_rejected_fraction=0.001")
    assert documents(built(bench, source, "data.max_rejected_fraction=0.5", "data.deduplicate=true")) == 60


@acts("data.loss_on")
def which_tokens_the_loss_counts(bench: Bench) -> None:
    """The trainer and the evaluator read the mask that stands in the snapshot: tests/wiring/test_answers.py."""
    rows = [json.dumps({"prompt": f"{number}? ", "completion": "yes"}) for number in range(80)]
    (bench.flow.folder / "talk.jsonl").write_text("\n".join(rows))
    manifest = built(bench, 'data.sources=["talk.jsonl"]', "data.tokenizer=bytes", "data.loss_on=answers")
    assert not isinstance(manifest.answers, msgspec.UnsetType)
    assert manifest.answers.train_tokens == 4 * manifest.split("train").documents


@acts("data.weights", "data.stages", "data.stages.step", "data.stages.weights")
def how_much_of_each_source_is_drawn(bench: Bench) -> None:
    """The trainer is sent weights and stages; what it draws by them test_weighted_training.py sees."""
    for name in "ab":
        (bench.flow.folder / f"{name}.txt").write_text(TEXT)
    stages = "data.stages=[{step=2,weights=[1,4]}]"
    bench.flow.train('data.sources=["a.txt","b.txt"]', "data.weights=[3,1]", stages)
    spec, _ = bench.flow.heard()
    assert (spec.data.sources, spec.data.weights_by_step) == (("a.txt", "b.txt"), {0: (3.0, 1.0), 2: (1.0, 4.0)})
