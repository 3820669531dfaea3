"""Rows of conversations become a snapshot that says of each token whether the loss counts it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.storage.errors import IntegrityError, SnapshotDamaged
from cairn.storage.snapshots.data_snapshot import OpenSnapshot, SnapshotFiles, open_snapshot, read_manifest
from cairn.storage.snapshots.snapshot_manifest import SPLITS
from cairn.storage.snapshots.token_shard import map_shard
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.foreign_tokenizer import find_template, parse_tokenizer
from cairn.tasks.data.snapshot_build import build_snapshot, repair_snapshot
from cairn.tasks.data.snapshot_lookup import SnapshotReference, check_block_size
from cairn.tasks.data.token_files import TokenFileFormat
from cairn.tasks.data.token_import import export_tokens
from cairn.tasks.tokenize_and_split import tokenize_part
from tests.tasks.corpus_files import build_in_shards, packed

pytestmark = pytest.mark.usefixtures("forked_parsers")
CHATML = (Path(__file__).parent / "chat_templates" / "chatml.jinja").read_text()
ENDED = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[{{ m.content }}]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
TALKS = [
    [{"role": "user", "content": f"Stone {n}?"}, {"role": "assistant", "content": f"It is {n} é😀."}] for n in range(60)
]
PLAIN, MASKED = ModelConfig(block_size=16), TrainingConfig(steps=1, mask_documents=True)
OWN = ModelConfig.model_validate({"module": "my.py:build", "block_size": 16})


class World:
    """A folder with a tokenizer and its template, and a store."""

    def __init__(self, folder: Path, template: str | None = CHATML, end_of_text: str = "") -> None:
        self.folder, self.store, self.end_of_text = folder, LocalStore(folder / "store"), end_of_text
        document = json.loads(Tokenizer.bytes().json)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        document["added_tokens"] = [{"id": 256 + n, "content": one, **flags} for n, one in enumerate(SPECIAL)]
        begin = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": begin,
            "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [259], "tokens": ["<s>"]}},
        }
        (folder / "tokenizer.json").write_text(json.dumps(document))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
        )
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)

    def data(self, *sources: str, **settings: Any) -> DataConfig:
        given = {"tokenizer": "tokenizer.json", "loss_on": "answers", "end_of_text": self.end_of_text, **settings}
        return DataConfig(sources=sources, **given)

    def build(self, content: bytes, name: str = "a.jsonl", **settings: Any) -> SnapshotReference:
        (self.folder / name).write_bytes(content)
        return build_snapshot(self.store, self.data(name, **settings), self.folder)

    def open(self, made: SnapshotReference) -> OpenSnapshot:
        return open_snapshot(self.store, made.snapshot_id, self.folder / "cache")

    def counted(self, made: SnapshotReference) -> list[tuple[str, str]]:
        """The text of each document, sorted, and the part of it that the loss counts."""
        opened = self.open(made)
        tokenizer = parse_tokenizer(opened.tokenizer_json, opened.manifest.end_of_text_id)
        found = list[tuple[str, str]]()
        for tokens, masks in ((opened.train, opened.train_answers), (opened.val, opened.val_answers)):
            ids, mask = (np.concatenate([shard.tokens() for shard in row]) for row in (tokens, masks))
            ends = np.flatnonzero(ids == opened.manifest.end_of_text_id) + 1
            for part, chosen in zip(np.split(ids, ends)[:-1], np.split(mask, ends)[:-1], strict=True):
                found.append((tokenizer.decode(part.tolist()), tokenizer.decode(part[chosen].tolist())))
        return sorted(found)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def lines(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def messages(talks: Sequence[Any] = TALKS) -> list[Any]:
    return [{"id": number, "messages": talk} for number, talk in enumerate(talks)]


def expected(n: int) -> tuple[str, str]:
    answer = f"It is {n} é😀.<|im_end|>\n"
    return f"<|im_start|>user\nStone {n}?<|im_end|>\n<|im_start|>assistant\n{answer}<|endoftext|>", answer


def test_each_conversation_is_a_document_of_which_the_answer_counts(world: World) -> None:
    made = world.build(lines(messages()))
    assert world.counted(made) == sorted(map(expected, range(60)))
    answers = made.manifest.answers
    assert answers.train_tokens + answers.val_tokens == sum(len(expected(n)[1].encode()) - 9 for n in range(60))
    assert f"{answers.train_tokens:,} of {made.manifest.splits.train.tokens:,} train tokens" in made.notes[-1]


def test_a_mask_takes_a_bit_a_token_and_lies_beside_each_shard(world: World) -> None:
    (world.folder / "a.jsonl").write_bytes(lines(messages(TALKS * 20)))
    made = build_in_shards(8192, world.store, world.data("a.jsonl"), world.folder)
    objects = {item.key: item for item in made.manifest.objects}
    masks = [name for name in objects if name.startswith("answers-train-")]
    assert len(masks) > 2 and {f"answers-{name}" for name in objects if name.startswith("train-")} == {*masks}
    for name in masks:
        assert objects[name].tokens == objects[name.removeprefix("answers-")].tokens
        assert objects[name].bytes < objects[name].tokens / 8 + 1024


@pytest.mark.parametrize("shape", ["jsonl.gz", "json", "parquet"])
def test_every_shape_of_file_gives_the_same_tokens_and_masks(world: World, shape: str) -> None:
    plain = world.counted(world.build(lines(messages())))
    if shape == "parquet":
        parquet.write_table(pa.Table.from_pylist(messages()), world.folder / "b.parquet", row_group_size=7)
        content = (world.folder / "b.parquet").read_bytes()
    else:
        content = packed(lines(messages()), ".gz") if shape == "jsonl.gz" else json.dumps(messages(), indent=1).encode()
    assert world.counted(world.build(content, f"b.{shape}")) == plain


def test_prompt_and_completion_are_a_turn_where_the_tokenizer_has_a_template(world: World) -> None:
    rows = [{"prompt": talk[0]["content"], "completion": talk[1]["content"]} for talk in TALKS]
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, world.folder / "p.parquet")
    made = [world.build(lines(rows)), world.build((world.folder / "p.parquet").read_bytes(), "p.parquet")]
    assert [world.counted(one) for one in made] == [sorted(map(expected, range(60)))] * 2


def test_without_a_template_the_completion_counts_and_the_end_behind_it(tmp_path: Path) -> None:
    world = World(tmp_path, template=None)
    rows = [{"prompt": f"{n} + {n} = ", "completion": f"{2 * n} é"} for n in range(60)]
    for tokenizer in ("tokenizer.json", "bytes"):
        counted = world.counted(world.build(lines(rows), tokenizer=tokenizer, val_fraction=0.3))
        assert counted == sorted((f"{n} + {n} = {2 * n} é<|endoftext|>", f"{2 * n} é<|endoftext|>") for n in range(60))


def test_a_begin_token_stands_once_and_an_end_that_the_template_writes_is_the_documents(tmp_path: Path) -> None:
    world = World(tmp_path, ENDED, end_of_text="</s>")
    counted = world.counted(world.build(lines(messages())))
    assert counted[0] == ("<s>[Stone 0?]It is 0 é😀.</s>", "It is 0 é😀.</s>")
    assert all(text.count("<s>") == text.count("</s>") == 1 for text, _ in counted)


def test_ends_within_conversations_are_counted_and_bounds_of_documents_are_then_refused(tmp_path: Path) -> None:
    world = World(tmp_path, ENDED, end_of_text="</s>")
    made = world.build(lines(messages([TALKS[n] + TALKS[-n] for n in range(60)])))
    assert made.manifest.answers.inner_ends == 60
    check_block_size(made.manifest, PLAIN, world.data("a.jsonl"), TrainingConfig(steps=1))
    with pytest.raises(InvalidCorpus, match=r"mask_documents = true: 60 end-of-text tokens stand within"):
        check_block_size(made.manifest, PLAIN, world.data("a.jsonl"), MASKED)
    with pytest.raises(InvalidCorpus, match=r"model.module = 'my.py:build': the snapshot holds conversations"):
        check_block_size(made.manifest, OWN, world.data("a.jsonl"), TrainingConfig(steps=1))
    other = World(tmp_path, ENDED).build(lines(messages()))
    check_block_size(other.manifest, PLAIN, world.data("a.jsonl"), MASKED)


def test_two_machines_make_the_masks_of_one(world: World) -> None:
    for number in range(3):  # each shares half of its rows with the next one
        (world.folder / f"{number}.jsonl").write_bytes(lines(messages(TALKS[number * 15 : number * 15 + 30])))
    data = world.data("*.jsonl", deduplicate=True)
    alone = build_snapshot(LocalStore(world.folder / "alone"), data, world.folder)
    for part in (1, 2):
        tokenize_part.fn(part, 2, data, world.folder, cache_dir=world.folder / "work", store=world.store)
    together = build_snapshot(world.store, data, world.folder)
    assert together.snapshot_id == alone.snapshot_id and len(world.counted(together)) == 60


def test_a_damaged_mask_is_found_and_built_again(world: World) -> None:
    made = world.build(lines(messages()))
    path = world.folder / "store" / "data" / made.snapshot_id / "answers-train-00000.arrow"
    sound = path.read_bytes()
    path.write_bytes(sound[:-3] + b"abc")
    with pytest.raises(SnapshotDamaged):
        world.open(made)
    repaired = repair_snapshot(world.store, made.snapshot_id, world.data("a.jsonl"), world.folder)
    assert repaired == ("answers-train-00000.arrow",) and path.read_bytes() == sound


def test_another_template_or_none_is_another_snapshot_and_the_same_ones_are_reused(world: World) -> None:
    content = lines([{"text": f"as text {n}", **row} for n, row in enumerate(messages())])
    first = world.build(content)
    assert world.build(content).reused
    text = world.build(content, loss_on=None, tokenizer="tokenizer.json")
    assert not hasattr(read_manifest(world.store, text.snapshot_id).answers, "train_tokens")
    (world.folder / "chat_template.jinja").write_text(CHATML + "{# other #}")
    assert not (again := world.build(content)).reused and again.snapshot_id == first.snapshot_id, "the same bytes"
    (world.folder / "chat_template.jinja").write_text(CHATML.replace("assistant", "model"))
    with pytest.raises(InvalidCorpus, match="rendered otherwise than in the whole"):
        world.build(content)


REFUSED = {
    "text": ("a.txt", b"a text\n" * 60, {}, "it is text, and data.loss_on = 'answers'"),
    "a table without the fields": ("a.csv", b"prompt,completion\na,b\n", {}, "rows of JSON or Parquet"),
    "messages without a template": (
        "a.jsonl",
        lines(messages()),
        {"tokenizer": "bytes"},
        "messages need a chat template",
    ),
    "other fields": ("a.jsonl", lines([{"text": "a"}] * 60), {}, "no fields messages, or prompt and completion"),
    "no answer": ("a.jsonl", lines(messages([talk[:1] for talk in TALKS])), {}, "no message of the assistant"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_holds_no_conversation_is_refused_by_its_name(world: World, name: str) -> None:
    file, content, settings, said = REFUSED[name]
    with pytest.raises(InvalidCorpus, match=said):
        world.build(content, file, **settings)


def test_few_bad_rows_are_left_out_and_counted_by_reason(world: World) -> None:
    bad = [{"messages": TALKS[0][:1]}, {"messages": "a"}, {"text": "a"}]
    made = world.build(lines([*messages(TALKS), *bad]), max_rejected_fraction=0.1)
    kinds = {item.kind: item.documents for item in made.manifest.rejected}
    assert kinds == {"missing-field": 1, "no-answer": 1, "not-a-conversation": 1}
    assert len(world.counted(made)) == 60


def test_conversations_in_which_nothing_counts_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path, "{{ messages[0].content }}{% generation %}{% endgeneration %}")
    with pytest.raises(InvalidCorpus, match="no token of a split is an answer's"):
        world.build(lines(messages()))


@pytest.mark.parametrize("key", [{"text_field": "body"}, {"max_document_bytes": 1000}])
def test_a_key_that_conversations_do_not_know_is_refused(key: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no effect on conversations"):
        DataConfig(sources=("a.jsonl",), loss_on="answers", **key)


def test_a_mask_with_nulls_is_refused(world: World) -> None:
    made = world.build(lines(messages()))
    schema = replace(made.manifest.shard_schema, is_mask=True).arrow()
    path = world.folder / "nulls.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([True, None, False])], schema=schema))
    with pytest.raises(IntegrityError, match="object values"):
        map_shard(path, replace(made.manifest.shard_schema, is_mask=True), where="mask")


def test_built_in_text_holds_no_conversations() -> None:
    with pytest.raises(ValueError, match="holds no conversations"):
        DataConfig(sources=("python:topics",), loss_on="answers")


def test_the_template_is_the_file_s_then_the_configuration_s_and_of_several_the_default(tmp_path: Path) -> None:
    world = World(tmp_path, template=None)
    config = {
        "bos_token": "<b>",
        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
    }
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<a>", "pad_token": {"content": "<p>"}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = find_template(world.data("a.jsonl"), tmp_path)
    assert found is not None and (found.text, found.tokens) == ("d", {"bos_token": "<b>", "pad_token": "<p>"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "one"}))
    assert find_template(world.data("a.jsonl"), tmp_path).text == "one"  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(world.data("a.jsonl"), tmp_path).text == "file"  # type: ignore[union-attr]
    assert find_template(world.data("a.jsonl", tokenizer="bytes"), tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(InvalidCorpus, match="one JSON object"):
        find_template(world.data("a.jsonl"), tmp_path)


def test_token_files_which_would_lose_the_mask_are_not_written(world: World) -> None:
    files = SnapshotFiles(world.store, world.build(lines(messages())).snapshot_id, world.folder / "cache")
    with pytest.raises(InvalidCorpus, match="holds conversations, of which answers count"):
        export_tokens(files, world.folder / "out", TokenFileFormat("nanogpt"))
    assert not (world.folder / "out").exists()


def test_splits_have_masks_of_their_own(world: World) -> None:
    made = world.build(lines(messages()), val_fraction=0.4)
    opened = world.open(made)
    for split, shards in zip(SPLITS, (opened.train_answers, opened.val_answers), strict=True):
        assert sum(map(len, shards)) == made.manifest.split(split).tokens
