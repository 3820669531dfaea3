"""The recipe of a data snapshot: what goes in, and which snapshot came out of it before.

Owns the record and its place in the store. A recipe is only a cache: without it, or with a broken one, the same
snapshot is built again. Weights are no part of it: how much of a group is drawn changes no byte. Refuses to know how.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from model.configuration.data import DataConfig
from storage.errors import IntegrityError, ObjectMissing
from storage.snapshots.data_snapshot import SnapshotManifest, read_manifest
from storage.stores.document import decode, encode, sha256
from storage.stores.object_store import ObjectStore
from tasks.data.document import Source

RECIPE_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotReference:
    """A published snapshot; ``reused`` says that its recipe was known and no text was tokenized."""

    snapshot_id: str
    manifest: SnapshotManifest
    reused: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSource:
    """One ingredient: a source by name and content, and the group it lies in where groups are kept apart."""

    name: str
    sha256: str
    unit: str
    # Not written unless there is one: recipes of before the field keep their ids.
    group: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides a snapshot's bytes, known before any text is tokenized."""

    version: int
    sources: tuple[RecipeSource, ...]
    tokenizer: str
    tokenizer_bytes: int
    text_field: str
    max_document_bytes: int
    deduplicate: bool
    val_fraction: float
    shard_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeResult:
    """What a recipe gave."""

    recipe: Recipe
    snapshot_id: str


def recipe_of(data: DataConfig, sources: Sequence[Source], tokenizer: str, shard_tokens: int) -> Recipe:
    """Return the recipe; ``tokenizer`` is the hash of a given one, or how it is learned."""
    return Recipe(
        version=RECIPE_VERSION,
        sources=tuple(
            RecipeSource(name=item.name, sha256=item.sha256, unit=item.unit, group=item.group or msgspec.UNSET)
            for item in sources
        ),
        tokenizer=tokenizer,
        tokenizer_bytes=data.tokenizer_bytes,
        text_field=data.text_field,
        max_document_bytes=data.max_document_bytes,
        deduplicate=data.deduplicate,
        val_fraction=data.val_fraction,
        shard_tokens=shard_tokens,
    )


def recipe_id(recipe: Recipe) -> str:
    """Return the recipe's name: the hash of its bytes."""
    return sha256(encode(recipe))


def known_snapshot(store: ObjectStore, recipe: Recipe) -> SnapshotReference | None:
    """Return the snapshot that the recipe gave before, if it is still there."""
    key = _key(recipe)
    try:
        snapshot_id = decode(store.read(key), RecipeResult, where=key).snapshot_id
        manifest = read_manifest(store, snapshot_id)
    except (ObjectMissing, IntegrityError):
        return None
    return SnapshotReference(snapshot_id=snapshot_id, manifest=manifest, reused=True)


def keep_recipe(store: ObjectStore, recipe: Recipe, snapshot_id: str) -> None:
    """Remember what the recipe gave."""
    store.write(_key(recipe), encode(RecipeResult(recipe=recipe, snapshot_id=snapshot_id)))


def _key(recipe: Recipe) -> str:
    return f"data/recipes/{recipe_id(recipe)}.json"
