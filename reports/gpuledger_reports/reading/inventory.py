"""When each board was in the inventory: what costs money, whether it is used or not.

Pure. A board is there from the first version of its node's inventory that names it until the
version that no longer does, or until its node is deleted; where the node comes back, from then on
again. Before a node's first record nothing is known of its deletion: the inventory's word holds.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from gpuledger_reports.reading.times import HOUR_US
from gpuledger_reports.reading.versions import NodeVersion

Node = tuple[str, str]
"""Cluster and name."""
NEVER_US: Final = 2**62
"""A time after all others: nothing has ended there."""


class InventoryRow(NamedTuple):
    """One GPU of one version of a node's inventory."""

    cluster: str
    node: str
    since_us: int
    kafka_offset: int
    gpu_uuid: str | None
    """Absent where the version says that the node has no GPU."""
    model: str | None


class Stay(NamedTuple):
    """A board in a node from one time up to and without another, in microseconds."""

    node: Node
    physical_gpu: str
    model: str | None
    begin_us: int
    end_us: int


def stays_of(
    rows: Iterable[InventoryRow],
    nodes: Mapping[Node, Sequence[NodeVersion]],
    *,
    earliest_us: Mapping[Node, int] | None = None,
) -> list[Stay]:
    """Return when each board was there, in the order of nodes, boards and times.

    `nodes` has each node's versions in the order in which they came into force, `earliest_us`
    before when boards of some nodes were not there, whatever these nodes' clocks have said.
    """
    earliest = earliest_us or {}
    versions: dict[Node, dict[tuple[int, int], dict[str, str | None]]] = defaultdict(dict)
    for row in rows:
        node = (row.cluster, row.node)
        since_us = max(row.since_us, earliest.get(node, row.since_us))
        physical_gpus = versions[node].setdefault((since_us, row.kafka_offset), {})
        if row.gpu_uuid is not None:
            physical_gpus[row.gpu_uuid] = row.model
    stays = (
        stay
        for node, inventory in versions.items()
        for stay in _stays_in(node, inventory, list(_deletions(nodes.get(node, ()))))
    )
    ordered = sorted(stays, key=lambda stay: (stay.node, stay.physical_gpu, stay.begin_us))
    return [
        stay
        for _, of_physical_gpu in groupby(ordered, key=lambda stay: (stay.node, stay.physical_gpu))
        for stay in _with_one_model_an_hour(_with_models(list(of_physical_gpu)))
    ]


def _with_models(stays: Sequence[Stay]) -> Iterator[Stay]:
    """Yield a board's stays, with the model before or after where a version does not say it."""
    model = next((stay.model for stay in stays if stay.model is not None), None)
    for stay in stays:
        model = model if stay.model is None else stay.model
        yield stay._replace(model=model)


def _with_one_model_an_hour(stays: Iterable[Stay]) -> Iterator[Stay]:
    """Yield a board's stays such that each hour has one model: that of its first stay.

    Usage is summed by hours, and all of an hour has one price.
    """
    before: Stay | None = None
    for stay in stays:
        rest = stay
        hour_us = stay.begin_us // HOUR_US * HOUR_US
        if before and before.model != stay.model and before.end_us > hour_us:
            change_us = min(stay.end_us, -(-stay.begin_us // HOUR_US) * HOUR_US)
            if stay.begin_us < change_us:
                yield stay._replace(model=before.model, end_us=change_us)
            rest = stay._replace(begin_us=change_us)
            # Gone again within that hour: what comes next in it has the same model still.
            if rest.begin_us >= rest.end_us:
                before = stay._replace(model=before.model)
                continue
        yield rest
        before = rest


def _stays_in(
    node: Node,
    inventory: Mapping[tuple[int, int], Mapping[str, str | None]],
    deletions: Sequence[tuple[int, int]],
) -> Iterator[Stay]:
    open_since: dict[str, tuple[int, str | None]] = {}
    for (since, _), physical_gpus in sorted(inventory.items(), key=lambda version: version[0]):
        # A version has all boards of its node: what it does not name is gone. One that has another
        # name from then on costs what that costs.
        for physical_gpu, (begin, model) in list(open_since.items()):
            if physical_gpu not in physical_gpus or physical_gpus[physical_gpu] not in (
                model,
                None,
            ):
                del open_since[physical_gpu]
                yield from _alive(Stay(node, physical_gpu, model, begin, since), deletions)
        for physical_gpu, model in physical_gpus.items():
            open_since.setdefault(physical_gpu, (since, model))
    for physical_gpu, (begin, model) in open_since.items():
        yield from _alive(Stay(node, physical_gpu, model, begin, NEVER_US), deletions)


def _deletions(versions: Sequence[NodeVersion]) -> Iterator[tuple[int, int]]:
    """Yield from when to when a node was deleted."""
    following = [version.since_us for version in versions[1:]]
    for version, next_since in zip(versions, [*following, NEVER_US], strict=False):
        if version.deleted_us is not None:
            # A deletion is a version too; the node is back with the next one that is none.
            yield version.deleted_us, max(next_since, version.deleted_us)


def _alive(stay: Stay, deletions: Sequence[tuple[int, int]]) -> Iterator[Stay]:
    """Yield a stay without the times at which its node was deleted."""
    edges = sorted({stay.begin_us, stay.end_us, *(edge for span in deletions for edge in span)})
    kept: Stay | None = None
    for begin, end in pairwise(edges):
        # A deletion before or after the stay is none of it.
        if begin < stay.begin_us or end > stay.end_us:
            continue
        if any(gone <= begin < back for gone, back in deletions):
            if kept:
                yield kept
            kept = None
        else:
            kept = stay._replace(begin_us=kept.begin_us if kept else begin, end_us=end)
    if kept:
        yield kept
