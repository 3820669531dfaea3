"""Finds a snapshot by its recipe (without weights, which change no byte), or by the id of a `snapshot:<id>` source."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from model.configuration.data import SNAPSHOT_SOURCE, DataConfig
from storage.errors import IntegrityError, ObjectMissing
from storage.snapshots.data_snapshot import list_snapshots, read_manifest
from storage.snapshots.snapshot_manifest import SnapshotManifest
from storage.stores.document import decode, encode, project, sha256
from storage.stores.object_store import ObjectStore
from tasks.data.document import InvalidCorpus, Source

_RECIPE_VERSION = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotReference:
    """A published snapshot; `reused` if it existed already."""

    snapshot_id: str
    manifest: SnapshotManifest
    reused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSource:
    """A source by name and content, and its group if weights keep the sources apart."""

    name: str
    sha256: str
    unit: str
    group: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides a snapshot's bytes and is known before tokenization."""

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
    """The snapshot that a recipe gave."""

    recipe: Recipe
    snapshot_id: str


def make_recipe(data: DataConfig, sources: Sequence[Source], tokenizer: str, shard_tokens: int) -> Recipe:
    """Return the recipe; `tokenizer` is the hash of a given tokenizer, or how it is trained."""
    return project(
        data,
        Recipe,
        version=_RECIPE_VERSION,
        sources=tuple(
            RecipeSource(name=item.name, sha256=item.sha256, unit=item.unit, group=item.group or msgspec.UNSET)
            for item in sources
        ),
        tokenizer=tokenizer,
        shard_tokens=shard_tokens,
    )


def recipe_id(recipe: Recipe) -> str:
    """Return the SHA-256 of the recipe."""
    return sha256(encode(recipe))


def find_by_recipe(store: ObjectStore, recipe: Recipe) -> SnapshotReference | None:
    """Return the snapshot that the recipe gave before, if it still exists."""
    key = _key(recipe)
    try:
        snapshot_id = decode(store.read(key), RecipeResult, where=key).snapshot_id
        manifest = read_manifest(store, snapshot_id)
    except (ObjectMissing, IntegrityError):
        return None
    return SnapshotReference(snapshot_id=snapshot_id, manifest=manifest, reused=True)


def save_recipe(store: ObjectStore, recipe: Recipe, snapshot_id: str) -> None:
    """Record the snapshot that the recipe gave."""
    store.write(_key(recipe), encode(RecipeResult(recipe=recipe, snapshot_id=snapshot_id)))


def find_by_id(store: ObjectStore, beginning: str) -> SnapshotReference:
    """Return the snapshot whose id begins with `beginning`; raises InvalidCorpus if there is not exactly one."""
    existing = list_snapshots(store)
    found = [snapshot_id for snapshot_id in existing if snapshot_id.startswith(beginning)]
    if len(found) > 1:
        raise _invalid(beginning, f"{len(found)} snapshots begin so: {', '.join(found)}", "name one of them wholly")
    if not found:
        listed = ", ".join(snapshot_id[:12] for snapshot_id in existing[:20]) or "none"
        rule = "it is in the store. Bring it there with `cairn import-tokens`, or name one that is: " + listed
        raise _invalid(beginning, f"no such snapshot in {store.url}", rule)
    try:
        return SnapshotReference(snapshot_id=found[0], manifest=read_manifest(store, found[0]), reused=True)
    except ObjectMissing as missing:
        raise _invalid(beginning, f"only a part of it is in {store.url}", "make it once more, to its end") from missing


def _key(recipe: Recipe) -> str:
    return f"data/recipes/{recipe_id(recipe)}.json"


def _invalid(beginning: str, problem: str, rule: str) -> InvalidCorpus:
    return InvalidCorpus(f"data.sources = '{SNAPSHOT_SOURCE}{beginning}': {problem}; rule: {rule}")
