"""Finds a snapshot by its recipe (without weights, which change no byte), or by the id of a `snapshot:<id>` source.

Assigns the weights of `data.weights` to a snapshot's groups by name, in the order of the snapshot.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from cairn.model.configuration.data import SNAPSHOT_SOURCE, DataConfig, TrainedBefore
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import Component, SampleOrder, window_range
from cairn.model.data.tokenizer import Tokenizer
from cairn.storage.errors import IntegrityError, ObjectMissing
from cairn.storage.snapshots import token_shard
from cairn.storage.snapshots.data_snapshot import list_snapshots, read_manifest
from cairn.storage.snapshots.snapshot_manifest import SPLITS, SnapshotManifest
from cairn.storage.stores import codec, object_store
from cairn.tasks.data.document import InvalidCorpus, Source

_DECISIVE_KEYS = {"tokenizer_bytes", "text_field", "max_document_bytes", "deduplicate", "val_fraction"}
"""Keys of `[data]` that decide a snapshot's bytes; the sources and the tokenizer count by their content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotReference:
    """A published snapshot; `reused` if it existed already.

    `unknown_bytes` of its text the tokenizer does not know; `turned_off` is what its file asks for and was not done;
    `added_ends` is the number of documents that ended by an index alone.
    """

    snapshot_id: str
    manifest: SnapshotManifest
    reused: bool = False
    unknown_bytes: int = 0
    turned_off: tuple[str, ...] = ()
    added_ends: int = 0

    @property
    def text_bytes(self) -> int:
        """The bytes of UTF-8 text in both splits."""
        return sum(self.manifest.split(split).bytes for split in SPLITS)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on what was not done as the files ask."""
        added = f"index: {self.added_ends:,} documents ended without an end of text, which was added to each"
        said = describe_tokenizer(self.turned_off, self.unknown_bytes, self.text_bytes)
        return said + (added,) * bool(self.added_ends) + describe_answers(self.manifest)


def describe_answers(manifest: SnapshotManifest) -> tuple[str, ...]:
    """Return a line on how many tokens the loss counts, where it does not count all."""
    if isinstance(found := manifest.answers, msgspec.UnsetType):
        return ()
    train, val = manifest.split("train").tokens, manifest.split("val").tokens
    held_out = f"{found.val_tokens:,} of {val:,} held-out tokens ({found.val_tokens / val:.0%})"
    shares = f"{found.train_tokens:,} of {train:,} train tokens ({found.train_tokens / train:.0%}), {held_out}"
    return (f"answers: the loss counts their tokens alone, {shares}",)


def describe_tokenizer(turned_off: Sequence[str], unknown_bytes: int, text_bytes: int) -> tuple[str, ...]:
    """Return a line on what is turned off, and one on what the tokenizer does not know, where there is any."""
    off = f"tokenizer: {', '.join(turned_off)} turned off, so that each document has one encoding, all of it"
    share = unknown_bytes / max(1, text_bytes)
    unknown = f"tokenizer: {unknown_bytes:,} bytes of the text ({share:.2%}) are unknown to it"
    return (off,) * bool(turned_off) + (unknown,) * bool(unknown_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeResult:
    """The snapshot that a recipe gave, and the bytes of its text that the tokenizer does not know."""

    recipe: Mapping[str, Any]
    snapshot_id: str
    unknown_bytes: int = 0


def make_recipe(data: DataConfig, sources: Sequence[Source], given: Tokenizer | None) -> dict[str, Any]:
    """Return all that decides a snapshot's bytes before tokenization: a given tokenizer by its hash, no file's size."""
    return {
        **data.model_dump(include=_DECISIVE_KEYS),
        "version": 3,
        "sources": [
            {"name": item.name, "sha256": item.sha256, "unit": item.unit}
            | {key: value for key in ("group", "placed", "form") if (value := getattr(item, key))}
            for item in sources
        ],
        **{key: value for key in ("separator", "end_of_text") if (value := getattr(data, key))},
        # An older version let text end documents with such a tokenizer: its snapshots are not taken.
        **({"spells_end": True} if given and given.spells_end else {}),
        "tokenizer": f"sha256:{given.sha256}" if given else data.tokenizer,
        "shard_tokens": token_shard.DEFAULT_SHARD_TOKENS,
    }


def recipe_id(recipe: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the recipe."""
    return codec.sha256(codec.encode(recipe))


def find_by_recipe(store: object_store.ObjectStore, recipe: Mapping[str, Any]) -> SnapshotReference | None:
    """Return the snapshot that the recipe gave before, if it still exists."""
    key = f"data/recipes/{recipe_id(recipe)}.json"
    try:
        result = codec.decode(store.read(key), RecipeResult, where=key)
        manifest = read_manifest(store, result.snapshot_id)
    except (ObjectMissing, IntegrityError):
        return None
    found, unknown = result.snapshot_id, result.unknown_bytes
    return SnapshotReference(snapshot_id=found, manifest=manifest, reused=True, unknown_bytes=unknown)


def find_unknown_bytes(store: object_store.ObjectStore, snapshot_id: str) -> int | None:
    """Return the bytes of a snapshot's text that its tokenizer does not know; None if no recipe gave the snapshot."""
    for key in store.keys("data/recipes"):
        with suppress(ObjectMissing, IntegrityError):
            result = codec.decode(store.read(key), RecipeResult, where=key)
            if result.snapshot_id == snapshot_id:
                return result.unknown_bytes
    return None


def save_recipe(store: object_store.ObjectStore, recipe: Mapping[str, Any], found: SnapshotReference) -> None:
    """Record the snapshot that the recipe gave."""
    result = RecipeResult(recipe=recipe, snapshot_id=found.snapshot_id, unknown_bytes=found.unknown_bytes)
    store.write(f"data/recipes/{recipe_id(recipe)}.json", codec.encode(result))


def find_by_id(store: object_store.ObjectStore, beginning: str) -> SnapshotReference:
    """Return the snapshot whose id begins with `beginning`; raises InvalidCorpus if there is not exactly one."""
    existing = list_snapshots(store)
    found = [snapshot_id for snapshot_id in existing if snapshot_id.startswith(beginning)]
    if len(found) > 1:
        raise _invalid(beginning, f"{len(found)} snapshots begin so: {', '.join(found)}", "name one of them wholly")
    if not found:
        listed = ", ".join(snapshot_id[:12] for snapshot_id in existing[:20]) or "none"
        rule = f"it is in the store. Bring it there with `cairn import-tokens`, or name one that is: {listed}"
        raise _invalid(beginning, f"no such snapshot in {store.url}", rule)
    try:
        return SnapshotReference(snapshot_id=found[0], manifest=read_manifest(store, found[0]), reused=True)
    except ObjectMissing as missing:
        raise _invalid(beginning, f"only a part of it is in {store.url}", "make it once more, to its end") from missing


def group_weights(manifest: SnapshotManifest, data: DataConfig) -> dict[str, tuple[float, ...]]:
    """Return the weights by stage of each group that is trained on, none without `data.weights`.

    Raises InvalidCorpus if the snapshot has other groups.
    """
    if not data.weights:
        return {}
    given = dict(zip(data.source_names, zip(*data.weights_by_step.values(), strict=True), strict=False))
    held_out = data.source_names[len(data.sources) :]
    groups = [group.name for group in manifest.known_groups if group.name not in held_out]
    if given.keys() != set(groups):
        apart = f"and the snapshot keeps apart {', '.join(groups) or 'no groups'}"
        rule = "a snapshot made with the same data.sources"
        raise InvalidCorpus(f"data.weights: are for {', '.join(sorted(given))}, {apart}; rule: {rule}")
    return given


def weighted_components(manifest: SnapshotManifest, data: DataConfig, block_size: int) -> tuple[Component, ...]:
    """Return the windows wholly of each weighted group; raises InvalidCorpus naming the source without one."""
    weights, components, start = group_weights(manifest, data), list[Component](), 0
    source_of = dict(zip(data.source_names, data.sources, strict=False))
    for group in (group for group in manifest.known_groups if group.name in weights):
        first, count = window_range(start, group.train_tokens, block_size)
        if count < 1:
            raise too_few_tokens(source_of[group.name], group.train_tokens, block_size)
        weight, *later = weights[group.name]
        components.append(Component(first_window=first, window_count=count, weight=weight, later_weights=tuple(later)))
        start += group.train_tokens
    return tuple(components)


def check_block_size(
    manifest: SnapshotManifest, model: ModelConfig, data: DataConfig, training: TrainingConfig
) -> None:
    """Raise InvalidCorpus if a split or a weighted source has no whole window of block_size + 1 tokens.

    Of conversations also for a module of one's own, and for masked documents if end-of-text tokens stand within.
    """
    if not isinstance(found := manifest.answers, msgspec.UnsetType):
        if model.module:
            rule = "only the networks that Cairn has count answers alone. Name other data, or leave model.module out"
            raise InvalidCorpus(f"model.module = {model.module!r}: the snapshot holds conversations; rule: {rule}")
        if training.mask_documents and found.inner_ends:
            problem = f"{found.inner_ends} end-of-text tokens stand within conversations"
            rule = "the token ends conversations alone. Name another with data.end_of_text, or leave mask_documents out"
            raise InvalidCorpus(f"training.mask_documents = true: {problem}; rule: {rule}")
    name = min(SPLITS, key=lambda split: manifest.split(split).tokens)
    tokens, block_size = manifest.split(name).tokens, model.block_size
    if block_size + 1 > tokens:
        problem = f"model.block_size = {block_size}: the {name} split has {tokens} tokens"
        rule = f"block_size is at most {tokens - 1}, one less than the tokens of each split"
        raise InvalidCorpus(f"{problem}; rule: {rule}. Lower model.block_size or add text to data.sources")
    weighted_components(manifest, data, block_size)


def order_samples(
    manifest: SnapshotManifest,
    data: DataConfig,
    training: TrainingConfig,
    block_size: int,
    *,
    quarantined: Collection[int] = (),
    before: TrainedBefore,
) -> SampleOrder:
    """Return the order in which a run draws the windows of the snapshot's train split."""
    return SampleOrder(
        window_count=(manifest.split("train").tokens - 1) // block_size,
        seed=training.seed,
        global_batch=training.global_batch,
        block_size=block_size,
        quarantined=frozenset(quarantined),
        components=weighted_components(manifest, data, block_size),
        before=before,
        stages=tuple(stage.step for stage in data.stages),
    )


def too_few_tokens(source: str, tokens: int, block_size: int) -> InvalidCorpus:
    """Return the error for a weighted source whose train text fills no window."""
    return InvalidCorpus(
        f"data.sources = {source!r}: {tokens} tokens of train text hold no window of its own; rule: with data.weights "
        f"every source fills one of model.block_size + 1 = {block_size + 1} tokens, and up to {block_size} more are "
        "lost where it borders on another. Add text, lower model.block_size, or leave the source out"
    )


def _invalid(beginning: str, problem: str, rule: str) -> InvalidCorpus:
    return InvalidCorpus(f"data.sources = '{SNAPSHOT_SOURCE}{beginning}': {problem}; rule: {rule}")
