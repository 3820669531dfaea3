"""From ``data.weights`` to what is drawn: each group of a snapshot with its weight, and its windows as a component.

Owns that a weight finds its group, by the name both have, so that neither the order of ``data.sources`` nor that of a
listing decides what a step trains on: components stand in the order of the snapshot. Refuses to know how a draw is made
(``model.data.sample_order``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model.configuration.data import DataConfig
from model.data.source_mixture import Component, cut_components
from model.errors import InvalidInput
from storage.snapshots.data_snapshot import SnapshotGroup, SnapshotManifest
from tasks.data.document import InvalidCorpus


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedGroup:
    """A group of a snapshot, the entry of ``data.sources`` that named it, and how much it is drawn."""

    group: SnapshotGroup
    source: str
    weight: float


def weighted_groups(manifest: SnapshotManifest, data: DataConfig) -> tuple[WeightedGroup, ...]:
    """Return the snapshot's groups in its order with their weights; none without ``data.weights``.

    Raises InvalidCorpus where the snapshot was not made with these groups.
    """
    if not data.weights:
        return ()
    said = dict(zip(data.source_names, zip(data.sources, data.weights, strict=True), strict=True))
    groups = {group.name: group for group in manifest.known_groups}
    if said.keys() != groups.keys():
        raise InvalidCorpus(
            f"data.weights: are for {', '.join(sorted(said))}, and the snapshot keeps apart "
            f"{', '.join(groups) or 'no groups'}; rule: a snapshot made with the same data.sources"
        )
    return tuple(
        WeightedGroup(group=group, source=said[name][0], weight=said[name][1]) for name, group in groups.items()
    )


def weighted_components(manifest: SnapshotManifest, data: DataConfig, block_size: int) -> tuple[Component, ...]:
    """Return the windows of each weighted group in the order of the snapshot; none without ``data.weights``.

    Raises InvalidCorpus naming the source that holds no whole window.
    """
    weighted = weighted_groups(manifest, data)
    components: tuple[Component, ...] = ()
    for end, last in enumerate(weighted, start=1):  # one more each time: the one that does not fit is the last
        try:
            components = _components(weighted[:end], block_size)
        except InvalidInput as error:
            raise too_few_tokens(last.source, last.group.train_tokens, block_size) from error
    return components


def too_few_tokens(source: str, tokens: int, block_size: int) -> InvalidCorpus:
    """Return the refusal of a weighted source whose train text fills no window of its own."""
    return InvalidCorpus(
        f"data.sources = {source!r}: {tokens} tokens of train text hold no window of its own; rule: with data.weights "
        f"every source fills one of model.block_size + 1 = {block_size + 1} tokens, and up to {block_size} more are "
        "lost where it borders on another. Add text, lower model.block_size, or leave the source out"
    )


def _components(weighted: Sequence[WeightedGroup], block_size: int) -> tuple[Component, ...]:
    counts = [item.group.train_tokens for item in weighted]
    return cut_components(counts, [item.weight for item in weighted], block_size)
