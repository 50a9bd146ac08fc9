"""When each physical GPU was in the inventory, which determines the asset cost. Pure.

A physical GPU is present from the first version of its node's inventory that lists it, until a
version does not list it or its node is deleted. If the node returns, the GPU is present again. A
deletion of the node before its first inventory record does not count.

A physical GPU is in one node at a time, the node whose inventory listed it last. A node that was
shut down publishes no new inventory, so its last one may list a GPU that has moved to another node.
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
"""The end time of a period that has not ended, in microseconds."""


class InventoryRow(NamedTuple):
    """One GPU of one version of a node's inventory."""

    cluster: str
    node: str
    since_us: int
    kafka_offset: int
    gpu_uuid: str | None
    """`None` if the version lists no GPU."""
    model: str | None


class Stay(NamedTuple):
    """The presence of a physical GPU in a node from one time until another, in microseconds."""

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
    """Return all stays, ordered by node, physical GPU and time.

    `nodes` contains each node's versions in the order in which they came into force. For some
    nodes, `earliest_us` contains a time before which their GPUs do not count as present, even if
    the inventory begins earlier.
    """
    earliest = earliest_us or {}
    versions: dict[Node, dict[tuple[int, int], dict[str, str | None]]] = defaultdict(dict)
    for row in rows:
        node = (row.cluster, row.node)
        since_us = max(row.since_us, earliest.get(node, row.since_us))
        physical_gpus = versions[node].setdefault((since_us, row.kafka_offset), {})
        if row.gpu_uuid is not None:
            physical_gpus[row.gpu_uuid] = row.model
    elsewhere = _times_elsewhere(versions)
    stays = (
        part
        for node, inventory in versions.items()
        for stay in _stays_in(node, inventory, list(_deletions(nodes.get(node, ()))))
        for part in _without(stay, elsewhere.get((node, stay.physical_gpu), ()))
    )
    ordered = sorted(stays, key=lambda stay: (stay.node, stay.physical_gpu, stay.begin_us))
    return [
        stay
        for _, of_physical_gpu in groupby(ordered, key=lambda stay: (stay.node, stay.physical_gpu))
        for stay in _with_one_model_an_hour(_with_models(list(of_physical_gpu)))
    ]


_Inventory = Mapping[tuple[int, int], Mapping[str, str | None]]
"""The physical GPUs of each version, with their models; a version's key is its time and offset."""


def _times_elsewhere(
    versions: Mapping[Node, _Inventory],
) -> dict[tuple[Node, str], list[tuple[int, int]]]:
    """Return the times at which a GPU that several nodes list was in another one of these nodes."""
    nodes_of: dict[str, list[Node]] = defaultdict(list)
    for node, inventory in versions.items():
        for physical_gpu in {gpu for gpus in inventory.values() for gpu in gpus}:
            nodes_of[physical_gpu].append(node)
    found: dict[tuple[Node, str], list[tuple[int, int]]] = defaultdict(list)
    for physical_gpu, nodes in nodes_of.items():
        if len(nodes) == 1:
            continue
        listed = sorted(
            (since_us, node)
            for node in nodes
            for (since_us, _), gpus in versions[node].items()
            if physical_gpu in gpus
        )
        ends_us = [*(since_us for since_us, _ in listed[1:]), NEVER_US]
        for (since_us, place), end_us in zip(listed, ends_us, strict=True):
            for node in nodes:
                if node != place and since_us < end_us:
                    found[node, physical_gpu].append((since_us, end_us))
    return found


def _with_models(stays: Sequence[Stay]) -> Iterator[Stay]:
    """Yield a physical GPU's stays; a stay without a model gets the previous or next model."""
    model = next((stay.model for stay in stays if stay.model is not None), None)
    for stay in stays:
        model = model if stay.model is None else stay.model
        yield stay._replace(model=model)


def _with_one_model_an_hour(stays: Iterable[Stay]) -> Iterator[Stay]:
    """Yield a physical GPU's stays, changed so that each hour has the model of its first stay.

    Usage is summed by hour, and an hour has only one price.
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
            # The stay ends within that hour, so the next stay keeps the model too.
            if rest.begin_us >= rest.end_us:
                before = stay._replace(model=before.model)
                continue
        yield rest
        before = rest


def _stays_in(
    node: Node,
    inventory: _Inventory,
    deletions: Sequence[tuple[int, int]],
) -> Iterator[Stay]:
    open_since: dict[str, tuple[int, str | None]] = {}
    for (since, _), physical_gpus in sorted(inventory.items(), key=lambda version: version[0]):
        # A version lists all physical GPUs of its node: a GPU that it does not list is gone. A GPU
        # with a new model begins a new stay, at that model's price.
        for physical_gpu, (begin, model) in list(open_since.items()):
            if physical_gpu not in physical_gpus or physical_gpus[physical_gpu] not in (
                model,
                None,
            ):
                del open_since[physical_gpu]
                yield from _without(Stay(node, physical_gpu, model, begin, since), deletions)
        for physical_gpu, model in physical_gpus.items():
            open_since.setdefault(physical_gpu, (since, model))
    for physical_gpu, (begin, model) in open_since.items():
        yield from _without(Stay(node, physical_gpu, model, begin, NEVER_US), deletions)


def _deletions(versions: Sequence[NodeVersion]) -> Iterator[tuple[int, int]]:
    """Yield the time of each deletion of a node, and the time at which the node returned."""
    following = [version.since_us for version in versions[1:]]
    for version, next_since in zip(versions, [*following, NEVER_US], strict=False):
        if version.deleted_us is not None:
            # A deletion is also a version; the node returns with the next version.
            yield version.deleted_us, max(next_since, version.deleted_us)


def _without(stay: Stay, spans: Sequence[tuple[int, int]]) -> Iterator[Stay]:
    """Yield the parts of a stay outside some spans of time, each given by its begin and end."""
    edges = sorted({stay.begin_us, stay.end_us, *(edge for span in spans for edge in span)})
    kept: Stay | None = None
    for begin, end in pairwise(edges):
        # Spans before or after the stay do not matter.
        if begin < stay.begin_us or end > stay.end_us:
            continue
        if any(gone <= begin < back for gone, back in spans):
            if kept:
                yield kept
            kept = None
        else:
            kept = stay._replace(begin_us=kept.begin_us if kept else begin, end_us=end)
    if kept:
        yield kept
