"""`gpuledger cluster retire`: takes back what is said of a cluster, or of a node, that is gone.

Two things would be said of it for ever: by podwatch, up to when its pods are complete, and by the
agents' last inventories, that there are boards, which a bill then counts as boards of which no tick
says anything. A node's inventory is ended by a version without GPUs: it stays on the compacted
topic, so that a store whose sink is away for days learns it too. An agent that starts there tells
its inventory anew.
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
from gpuledger.bus.protocol import Bus, HistoryReader, Message, Span
from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS
from gpuledger.codec import decoder_of, encode
from gpuledger.completeness import PODWATCH, key_of
from gpuledger.errors import UndecodableError, UserError
from gpuledger.keys import NodeId, node_key
from gpuledger.records import Inventory, Watermark
from gpuledger.time_ranges import parse_moment, write_moment
from gpuledger.topics import partition_of_node
from gpuledger_cli.kafka_options import NO_OPTIONS, KafkaOptions
from gpuledger_cli.option_help import epilogue, time_option
from gpuledger_cli.watermarks import read_watermarks

_UNRESPONSIVE_NS: Final = 2 * NS_PER_MINUTE
"""After so long the join calls a node unresponsive: one that ticked since is at work."""
_NAMED: Final = 5
"""Nodes of many that a message names."""


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """The newest inventory of a node."""

    partition: int
    inventory: Inventory
    """What it says but the GPUs, of which it may have hundreds of kilobytes."""
    gpu_count: int
    """How many GPUs it has."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the topics have of what is to be retired."""

    watermarks: Sequence[Watermark]
    """podwatch's, of the cluster."""
    inventories: Mapping[NodeId, LastWord]


@dataclass(frozen=True, kw_only=True)
class Retired:
    """What was taken back."""

    watermarks: int
    nodes: int
    gpu_count: int


app = App(name="cluster", help_format="plaintext")


@app.command(
    help_epilogue=epilogue(
        "Stop the agents and podwatch first, and wait two minutes. The command refuses to retire"
        " what is still running. An agent that starts again later undoes it.",
        examples={
            "A cluster": "gpuledger cluster retire eu-west-1",
            "A node of a cluster, gone since the morning": (
                "gpuledger cluster retire eu-west-1 --node gpu-node-7 --since 2026-11-21T08:00:00Z"
            ),
            "A node without a cluster name": ("gpuledger cluster retire default --node gpu-node-7"),
        },
        codes={2: "still running, unknown, invalid input, or Kafka is unavailable"},
    )
)
def retire(
    cluster: Annotated[str, Parameter(help="Cluster that is gone, or that the node was in.")],
    /,
    *,
    node: Annotated[
        str | None, Parameter(help="Node that is gone; by default the whole cluster.")
    ] = None,
    since: Annotated[
        str | None, time_option("When it was removed; its GPUs cost until then, by default now")
    ] = None,
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Retire a cluster or a node that is gone: its GPUs stop costing.

    The inventory and podwatch's watermarks of it end, so that nothing waits for them.
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
    sys.stdout.write(
        f"{what}: {done.gpu_count} GPUs of {done.nodes} nodes are gone since"
        f" {write_moment(since_ns // NS_PER_MS)}; {done.watermarks} watermarks of podwatch were"
        " taken back\n"
    )
    return 0


async def retire_from(
    bus: Bus, cluster: str, node: str | None = None, *, now_ns: int, since_ns: int
) -> Retired:
    """Retire a cluster, or one node of it, from a time on; return what was taken back.

    Raises `UserError`, with nothing done, where nothing is known of it, where it is at work, and
    where the time is none from which it can be gone.
    """
    watermarks = (await read_watermarks(bus, PODWATCH))[1]
    async with bus.reader() as reader:
        inventories = await read_inventories(bus, reader)
        published = Published(
            watermarks=[each for each in watermarks if each.cluster == cluster and node is None],
            inventories={
                key: found
                for key, found in inventories.items()
                if key.cluster == cluster and node in {None, key.node}
            },
        )
        if not published.watermarks and not published.inventories:
            raise _unknown(cluster, node, {*inventories}, {each.cluster for each in watermarks})
        partitions = {last.partition for last in published.inventories.values()}
        ticked = await read_ticked_nodes(
            bus, reader, partitions, since_ms=(now_ns - _UNRESPONSIVE_NS) // NS_PER_MS
        )
    refuse_at_work(published, ticked, now_ns=now_ns)
    refuse_time(published, now_ns=now_ns, since_ns=since_ns)
    return await publish_ends(bus, published, now_ns=now_ns, since_ns=since_ns)


def _unknown(
    cluster: str, node: str | None, nodes: Collection[NodeId], reported: Collection[str]
) -> UserError:
    if node is not None:
        known = _some(sorted(each.node for each in nodes if each.cluster == cluster))
        return UserError(
            f"no inventory says anything of a node {node!r} in cluster {cluster!r}; there are of:"
            f" {known}"
        )
    clusters = sorted({each.cluster for each in nodes} | set(reported))
    return UserError(
        f"neither podwatch nor an inventory has said anything of a cluster {cluster!r}; there is"
        f" of: {', '.join(clusters) or 'none'}"
    )


def refuse_at_work(published: Published, ticked: Collection[bytes], *, now_ns: int) -> None:
    """Raise `UserError` where podwatch or an agent is at work: it would say all that anew."""
    newest_ns = max((each.complete_until_ns for each in published.watermarks), default=0)
    if now_ns - newest_ns < NS_PER_MINUTE:
        raise UserError(
            f"podwatch of cluster {published.watermarks[0].cluster} was at work at"
            f" {write_moment(newest_ns // NS_PER_MS)}: stop it, and try again a minute later"
        )
    at_work = [
        key.node
        for key, last in published.inventories.items()
        if node_key(last.inventory).encode() in ticked
    ]
    if at_work:
        raise UserError(
            f"agents have ticked within the last two minutes: {_some(sorted(at_work))}; stop them,"
            " and try again two minutes later"
        )


def refuse_time(published: Published, *, now_ns: int, since_ns: int) -> None:
    """Raise `UserError` for a time that is to come, or before which a node told its inventory."""
    if since_ns > now_ns:
        raise UserError("--since: this is yet to come; retire it then")
    for key, last in published.inventories.items():
        # By a node's clock that is ahead it may have told it later than now, which is no reason.
        if since_ns < min(last.inventory.time_ns, now_ns) and last.gpu_count:
            raise UserError(
                f"--since: node {key.node} told which GPUs it has at"
                f" {write_moment(last.inventory.time_ns // NS_PER_MS)}, so they were there; give"
                " a time after it"
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "none") + more


async def read_inventories(bus: Bus, reader: HistoryReader) -> dict[NodeId, LastWord]:
    """Return the newest inventory of each node, of those that the store believes."""
    decoder = decoder_of(bus.topics.inventory.name, Inventory)
    found: dict[NodeId, LastWord] = {}
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
                # Who may write elsewhere speaks for no node but his own.
                if record.key == key.encode() and at.partition == home:
                    found[NodeId(inventory.cluster, inventory.node)] = LastWord(
                        partition=at.partition,
                        inventory=msgspec.structs.replace(inventory, gpus=[]),
                        gpu_count=len(inventory.gpus),
                    )
    return found


async def read_ticked_nodes(
    bus: Bus, reader: HistoryReader, partitions: Collection[int], *, since_ms: int
) -> set[bytes]:
    """Return the keys of the nodes that have ticked in these partitions since then."""
    spans = await reader.spans(bus.topics.samples.name)
    wanted = [at for at in spans if at.partition in partitions]
    begins = await reader.offsets_at(wanted, since_ms) if wanted else {}
    newest = {at: Span(max(spans[at].first, begin), spans[at].end) for at, begin in begins.items()}
    return {
        record.key
        for at, span in newest.items()
        async for records in reader.read(at, span)
        for record in records
        if record.key is not None
    }


async def publish_ends(bus: Bus, published: Published, *, now_ns: int, since_ns: int) -> Retired:
    """Publish that it is gone, and return what that was."""
    # A node that has none by its last word, as one that was retired before, has nothing to end.
    ended = [last for last in published.inventories.values() if last.gpu_count]
    time_ms = now_ns // NS_PER_MS
    async with bus.producer() as producer:
        for last in ended:
            # Of two versions the later one counts, by what the node's own clock had said.
            gone_ns = max(since_ns, last.inventory.time_ns)
            gone = msgspec.structs.replace(last.inventory, time_ns=gone_ns)
            message = Message(node_key(gone).encode(), encode(gone), time_ms)
            await producer.publish(bus.topics.inventory.name, last.partition, [message])
        for each in published.watermarks:
            tombstone = Message(key_of(each), None, time_ms)
            await producer.publish(bus.topics.watermarks.name, each.partition, [tombstone])
    return Retired(
        watermarks=len(published.watermarks),
        nodes=len(ended),
        gpu_count=sum(last.gpu_count for last in ended),
    )
