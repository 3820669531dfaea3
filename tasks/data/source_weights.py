"""Assigns the weights of `data.weights` to a snapshot's groups by name, in the order of the snapshot."""

from dataclasses import dataclass

from model.configuration.data import DataConfig
from model.data.source_mixture import Component, cut_components
from model.errors import InvalidInput
from storage.snapshots.snapshot_manifest import SnapshotGroup, SnapshotManifest
from tasks.data.document import InvalidCorpus


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedGroup:
    """A group of a snapshot, its entry of `data.sources`, and its weight."""

    group: SnapshotGroup
    source: str
    weight: float


def weighted_groups(manifest: SnapshotManifest, data: DataConfig) -> tuple[WeightedGroup, ...]:
    """Return the weighted groups, none without `data.weights`; raises InvalidCorpus if the snapshot has others."""
    if not data.weights:
        return ()
    given = dict(zip(data.source_names, zip(data.sources, data.weights, strict=True), strict=True))
    groups = {group.name: group for group in manifest.known_groups}
    if given.keys() != groups.keys():
        raise InvalidCorpus(
            f"data.weights: are for {', '.join(sorted(given))}, and the snapshot keeps apart "
            f"{', '.join(groups) or 'no groups'}; rule: a snapshot made with the same data.sources"
        )
    return tuple(
        WeightedGroup(group=group, source=given[name][0], weight=given[name][1]) for name, group in groups.items()
    )


def weighted_components(manifest: SnapshotManifest, data: DataConfig, block_size: int) -> tuple[Component, ...]:
    """Return the windows of each weighted group; raises InvalidCorpus naming the source without a whole window."""
    weighted = weighted_groups(manifest, data)
    components: tuple[Component, ...] = ()
    for end, last in enumerate(weighted, start=1):  # the last of a failing list is the one without a window
        try:
            counts = [item.group.train_tokens for item in weighted[:end]]
            components = cut_components(counts, [item.weight for item in weighted[:end]], block_size)
        except InvalidInput as error:
            raise too_few_tokens(last.source, last.group.train_tokens, block_size) from error
    return components


def too_few_tokens(source: str, tokens: int, block_size: int) -> InvalidCorpus:
    """Return the error for a weighted source whose train text fills no window."""
    return InvalidCorpus(
        f"data.sources = {source!r}: {tokens} tokens of train text hold no window of its own; rule: with data.weights "
        f"every source fills one of model.block_size + 1 = {block_size + 1} tokens, and up to {block_size} more are "
        "lost where it borders on another. Add text, lower model.block_size, or leave the source out"
    )
