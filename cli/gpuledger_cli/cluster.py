"""`gpuledger cluster retire`: ends the records of a decommissioned cluster or node.

Three kinds of records would otherwise stay valid. podwatch's watermarks contain the time through
which the cluster's pods are complete, and consumers wait for newer ones. The agents' last
inventories list GPUs, which bills would count as GPUs without data. Pods that waited for a node
would wait forever.

A node's inventory ends with a version without GPUs. This version stays on the compacted topic, so
that a store sink reads it even after an outage of several days. An agent that starts on the node
later publishes its inventory again.
"""

import asyncio
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus, HistoryReader, Message, Record, Span
from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS
from gpuledger.codec import decoder_of, encode
from gpuledger.completeness import PODWATCH, key_of
from gpuledger.errors import UndecodableError, UserError
from gpuledger.keys import NodeId, key_in, node_key
from gpuledger.records import Inventory, PendingPodRecord, Watermark
from gpuledger.texts import counted
from gpuledger.time_ranges import parse_moment, write_moment
from gpuledger.topics import partition_of_node
from gpuledger_cli.kafka_options import NO_OPTIONS, KafkaOptions
from gpuledger_cli.option_help import epilogue, time_option
from gpuledger_cli.watermarks import read_watermarks

UNRESPONSIVE_NS: Final = 2 * NS_PER_MINUTE
"""Time after which the join considers a node unresponsive. A node with newer ticks is running."""
_NAMED: Final = 5
"""Maximum number of nodes that a message names."""


@dataclass(frozen=True, kw_only=True)
class LastInventory:
    """The newest inventory of a node."""

    partition: int
    inventory: Inventory
    """The inventory without its GPUs, which may take hundreds of kilobytes."""
    gpu_count: int
    """Number of GPUs in the inventory."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """The records of the cluster or node to retire."""

    watermarks: Sequence[Watermark]
    """podwatch's watermarks of the cluster."""
    inventories: Mapping[NodeId, LastInventory]
    pending_pods: Sequence[PendingPodRecord]
    """The cluster's pods that wait for a node; none if only a node is retired."""


@dataclass(frozen=True, kw_only=True)
class Retired:
    """The numbers of removed watermarks, of retired nodes and GPUs, and of pods that waited."""

    watermarks: int
    nodes: int
    gpu_count: int
    pending_pods: int = 0


app = App(name="cluster", help_format="plaintext")


@app.command(
    help_epilogue=epilogue(
        "Stop the agents and podwatch first, and wait two minutes. The command fails if they are"
        " still running. An agent that starts again later undoes it.",
        examples={
            "A cluster": "gpuledger cluster retire eu-west-1",
            "A node of a cluster, removed this morning": (
                "gpuledger cluster retire eu-west-1 --node gpu-node-7 \\\n"
                "    --since 2026-11-21T08:00:00Z"
            ),
            "A node without a cluster name": ("gpuledger cluster retire default --node gpu-node-7"),
        },
        codes={2: "still running, unknown, invalid input, or Kafka is unavailable"},
    )
)
def retire(
    cluster: Annotated[str, Parameter(help="Decommissioned cluster, or the cluster of the node.")],
    /,
    *,
    node: Annotated[
        str | None, Parameter(help="Decommissioned node; by default the whole cluster.")
    ] = None,
    since: Annotated[
        str | None,
        time_option("When it was removed; its GPUs are charged until then, by default now"),
    ] = None,
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Retire a decommissioned cluster or node, so that its GPUs are no longer charged.

    Ends its inventories, podwatch's watermarks and the waiting of its pods.
    """
    settings = kafka.settings()
    now_ns = time.time_ns()
    since_ns = now_ns
    if since is not None:
        since_ms = parse_moment(since, option="--since", now_ms=now_ns // NS_PER_MS)
        since_ns = since_ms * NS_PER_MS
    done = asyncio.run(
        retire_from(KafkaBus(settings), cluster, node, now_ns=now_ns, since_ns=since_ns)
    )
    what = f"cluster {cluster}" if node is None else f"node {node} of cluster {cluster}"
    waits = f"; ended the wait of {counted(done.pending_pods, 'pod')}" if done.pending_pods else ""
    sys.stdout.write(
        f"{what}: retired {counted(done.gpu_count, 'GPU')} of {counted(done.nodes, 'node')},"
        f" charged until {write_moment(since_ns // NS_PER_MS)}; removed"
        f" {counted(done.watermarks, 'watermark')} of podwatch"
        f"{waits}\n"
    )
    return 0


async def retire_from(
    bus: Bus, cluster: str, node: str | None = None, *, now_ns: int, since_ns: int
) -> Retired:
    """Retire a cluster, or one of its nodes, from `since_ns` on.

    Raises `UserError` without any change if the cluster or node is unknown or still running, or if
    the time is invalid.
    """
    watermarks = (await read_watermarks(bus, PODWATCH))[1]
    async with bus.reader() as reader:
        inventories = await read_inventories(bus, reader)
        pending_pods = await read_pending_pods(bus, reader) if node is None else []
        published = Published(
            watermarks=[each for each in watermarks if each.cluster == cluster and node is None],
            inventories={
                key: found
                for key, found in inventories.items()
                if key.cluster == cluster and node in {None, key.node}
            },
            pending_pods=[each for each in pending_pods if each.cluster == cluster],
        )
        if not published.watermarks and not published.inventories:
            raise _unknown(cluster, node, {*inventories}, {each.cluster for each in watermarks})
        partitions = {last.partition for last in published.inventories.values()}
        ticked = await read_ticked_nodes(
            bus, reader, partitions, since_ms=(now_ns - UNRESPONSIVE_NS) // NS_PER_MS
        )
    refuse_at_work(published, ticked, now_ns=now_ns)
    refuse_time(published, now_ns=now_ns, since_ns=since_ns)
    return await publish_ends(bus, published, now_ns=now_ns, since_ns=since_ns)


def _unknown(
    cluster: str, node: str | None, nodes: Collection[NodeId], reported: Collection[str]
) -> UserError:
    if node is not None:
        known = name_some(sorted(each.node for each in nodes if each.cluster == cluster))
        return UserError(
            f"unknown node in cluster {cluster!r}: {node!r}; nodes with an inventory: {known}"
        )
    clusters = sorted({each.cluster for each in nodes} | set(reported))
    return UserError(
        f"unknown cluster: {cluster!r}; clusters with an inventory or podwatch:"
        f" {', '.join(clusters) or 'none'}"
    )


def refuse_at_work(published: Published, ticked: Collection[bytes], *, now_ns: int) -> None:
    """Raise `UserError` if podwatch or an agent runs; it would publish its records again."""
    newest_ns = max((each.complete_until_ns for each in published.watermarks), default=0)
    if now_ns - newest_ns < NS_PER_MINUTE:
        raise UserError(
            f"podwatch of cluster {published.watermarks[0].cluster} was running at"
            f" {write_moment(newest_ns // NS_PER_MS)}; stop it, and try again a minute later"
        )
    at_work = [
        key.node
        for key, last in published.inventories.items()
        if node_key(last.inventory).encode() in ticked
    ]
    if at_work:
        raise UserError(
            f"agents published samples within the last two minutes: {name_some(sorted(at_work))};"
            " stop them, and try again two minutes later"
        )


def refuse_time(published: Published, *, now_ns: int, since_ns: int) -> None:
    """Raise `UserError` for a time in the future, or before a node's last inventory."""
    if since_ns > now_ns:
        raise UserError("--since: the time is in the future; retire the cluster or node then")
    for key, last in published.inventories.items():
        # If a node's clock is ahead, its inventory may be later than now; that is accepted.
        if since_ns < min(last.inventory.time_ns, now_ns) and last.gpu_count:
            raise UserError(
                f"--since: node {key.node} published its GPUs later, at"
                f" {write_moment(last.inventory.time_ns // NS_PER_MS)}; give a time after that"
            )


def name_some(names: Sequence[str]) -> str:
    """Return names for a message: the first five, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "none") + more


async def read_inventories(bus: Bus, reader: HistoryReader) -> dict[NodeId, LastInventory]:
    """Return the newest valid inventory of each node, by the same rules as the store sink."""
    decoder = decoder_of(bus.topics.inventory.name, Inventory)
    found: dict[NodeId, LastInventory] = {}
    spans = await reader.spans(bus.topics.inventory.name)
    for at, span in spans.items():
        async for records in reader.read(at, span):
            for record in records:
                if record.value is None:
                    continue
                try:
                    inventory = decoder.decode(record.value)
                except UndecodableError:
                    continue
                key = node_key(inventory)
                home = partition_of_node(key, partitions=len(spans))
                # An inventory counts only under its node's key and in its node's partition.
                if record.key == key.encode() and at.partition == home:
                    found[NodeId(inventory.cluster, inventory.node)] = LastInventory(
                        partition=at.partition,
                        inventory=msgspec.structs.replace(inventory, gpus=[]),
                        gpu_count=len(inventory.gpus),
                    )
    return found


async def read_pending_pods(bus: Bus, reader: HistoryReader) -> list[PendingPodRecord]:
    """Return the newest valid record of each pod that waits for a node."""
    decoder = decoder_of(bus.topics.pending_pods.name, PendingPodRecord)
    found: dict[bytes | None, PendingPodRecord] = {}
    for at, span in (await reader.spans(bus.topics.pending_pods.name)).items():
        async for records in reader.read(at, span):
            for record in records:
                if record.value is None:
                    found.pop(record.key, None)
                    continue
                try:
                    pod = decoder.decode(record.value)
                except UndecodableError:
                    continue
                if record.key == key_in(pod.cluster, pod.uid).encode():
                    found[record.key] = pod
    return [pod for pod in found.values() if pod.left_time_ns is None]


async def read_ticked_nodes(
    bus: Bus, reader: HistoryReader, partitions: Collection[int], *, since_ms: int
) -> dict[bytes, Record]:
    """Return each node's newest tick in these partitions since `since_ms`, by the node's key."""
    spans = await reader.spans(bus.topics.samples.name)
    wanted = [at for at in spans if at.partition in partitions]
    begins = await reader.offsets_at(wanted, since_ms) if wanted else {}
    newest = {at: Span(max(spans[at].first, begin), spans[at].end) for at, begin in begins.items()}
    return {
        record.key: record
        for at, span in newest.items()
        async for records in reader.read(at, span)
        for record in records
        if record.key is not None
    }


async def publish_ends(bus: Bus, published: Published, *, now_ns: int, since_ns: int) -> Retired:
    """Publish records that end the inventories and remove the watermarks; return the numbers."""
    # An inventory without GPUs needs no end, for example if the node was retired before.
    ended = [last for last in published.inventories.values() if last.gpu_count]
    time_ms = now_ns // NS_PER_MS
    async with bus.producer() as producer:
        for last in ended:
            # The version with the later time counts, so the end must not be before the last
            # version.
            gone_ns = max(since_ns, last.inventory.time_ns)
            gone = msgspec.structs.replace(last.inventory, time_ns=gone_ns)
            message = Message(node_key(gone).encode(), encode(gone), time_ms)
            await producer.publish(bus.topics.inventory.name, last.partition, [message])
        # Without tombstones, like inventories, so that a sink reads the ends even after days.
        ends = [
            Message(
                key_in(pod.cluster, pod.uid).encode(),
                encode(
                    msgspec.structs.replace(pod, left_time_ns=max(since_ns, pod.created_time_ns))
                ),
                time_ms,
            )
            for pod in published.pending_pods
        ]
        if ends:
            await producer.publish(bus.topics.pending_pods.name, 0, ends)
        for each in published.watermarks:
            tombstone = Message(key_of(each), None, time_ms)
            await producer.publish(bus.topics.watermarks.name, each.partition, [tombstone])
    return Retired(
        watermarks=len(published.watermarks),
        nodes=len(ended),
        gpu_count=sum(last.gpu_count for last in ended),
        pending_pods=len(published.pending_pods),
    )
