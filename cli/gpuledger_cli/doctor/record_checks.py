"""The doctor's checks of recent records: podwatch, nodes, clocks and coverage.

The times in records are those of the components that wrote them. Only the markers that end the
join's transactions have times of the brokers' clocks. The check of clocks compares the nodes with
this machine, and this machine with the newest marker.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from gpuledger.bus.inspection import Inspector
from gpuledger.bus.protocol import Bus, Record, Span
from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS, NS_PER_SECOND
from gpuledger.codec import decoder_of
from gpuledger.errors import UndecodableError
from gpuledger.keys import NodeId, key_in, show_node, split_key
from gpuledger.records import GpuEvent, NodeSample, Watermark
from gpuledger.texts import counted
from gpuledger.time_ranges import write_moment
from gpuledger_cli.cluster import (
    UNRESPONSIVE_NS,
    LastInventory,
    name_some,
    read_inventories,
    read_ticked_nodes,
)
from gpuledger_cli.doctor.verdicts import Verdict, ok, problem, unknown
from gpuledger_cli.watermarks import read_watermarks

PODWATCH_STALE_NS: Final = NS_PER_MINUTE
"""Age from which podwatch's watermarks are stale; podwatch publishes them every 5 seconds."""
JOIN_STALE_NS: Final = 15 * NS_PER_MINUTE
"""Age from which the join's watermarks are stale, as in `GpuledgerJoinWatermarkStalled`."""
AHEAD_NS: Final = 2 * NS_PER_SECOND
"""Maximum time by which a node's clock may be ahead of this machine's clock."""
BEHIND_NS: Final = 15 * NS_PER_SECOND
"""Maximum age of a node's newest sample, in addition to its interval."""
COVERAGE_NS: Final = NS_PER_MINUTE
"""Length of the time whose coverage is checked."""
MIN_COVERAGE_RATIO: Final = 0.95
"""The default of `close.min_data_coverage_ratio` in price files."""
_RECENT_MS: Final = 20_000
"""Most nodes have sent a sample in this time; only for the others, older samples are read."""


async def check_podwatch(bus: Bus, *, now_ns: int) -> list[Verdict]:
    """Check podwatch's watermarks of each cluster."""
    partitions, watermarks = await read_watermarks(bus, "podwatch")
    return judge_podwatch(watermarks, partitions=partitions, now_ns=now_ns)


def judge_podwatch(
    watermarks: Sequence[Watermark], *, partitions: int, now_ns: int
) -> list[Verdict]:
    """Judge podwatch's watermarks: all must be recent, and all recent ones from one leader."""
    if not watermarks:
        return [
            problem(
                "podwatch has published nothing, so no pod has a name",
                "Start podwatch. If you do not use Kubernetes, add --skip podwatch.",
            )
        ]
    by_cluster: dict[str, list[Watermark]] = defaultdict(list)
    for watermark in watermarks:
        by_cluster[watermark.cluster].append(watermark)
    return [
        _judge_cluster(cluster, watermarks, partitions=partitions, now_ns=now_ns)
        for cluster, watermarks in sorted(by_cluster.items())
    ]


def _judge_cluster(
    cluster: str, watermarks: Sequence[Watermark], *, partitions: int, now_ns: int
) -> Verdict:
    times_ns = [watermark.complete_until_ns for watermark in watermarks]
    oldest = write_moment(min(times_ns) // NS_PER_MS)
    fresh = [
        watermark
        for watermark in watermarks
        if now_ns - watermark.complete_until_ns <= PODWATCH_STALE_NS
    ]
    if len(fresh) < partitions:
        return problem(
            f"cluster {cluster}: podwatch's watermarks of {partitions - len(fresh)} of {partitions}"
            f" partitions are missing or stale; the oldest is from {oldest}",
            "Read podwatch's failed checks in /readyz. For a decommissioned cluster, run"
            f" `gpuledger cluster retire {cluster}`.",
        )
    leaders = Counter(watermark.publisher for watermark in fresh)
    if len(leaders) > 1:
        return problem(
            f"cluster {cluster}: several podwatch leaders publish: {', '.join(sorted(leaders))}",
            "They use different Leases, or two clusters have the same name. Stop one leader, or set"
            " another `cluster`.",
        )
    return ok(f"cluster {cluster}: pods are complete through {oldest}")


_Read = tuple[Mapping[NodeId, LastInventory], Mapping[NodeId, Record]]


class Fleet:
    """The nodes' inventories and newest samples, read once for several checks."""

    def __init__(self, bus: Bus, *, time_ns: Callable[[], int] = time.time_ns) -> None:
        self._bus, self.time_ns = bus, time_ns
        self.sampled_ns = 0
        """When the newest samples were looked up, by this machine's clock."""
        self._reading: asyncio.Task[_Read] | None = None

    async def read(self) -> _Read:
        """Return each node's inventory, and each node's newest sample of the last two minutes."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        # A check's deadline must not end the reading for the others.
        return await asyncio.shield(self._reading)

    async def close(self) -> None:
        """End the reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self) -> _Read:
        async with self._bus.reader() as reader:
            inventories = await read_inventories(self._bus, reader)
            spans = await reader.spans(self._bus.topics.samples.name)
            every = {at.partition for at in spans}
            self.sampled_ns = self.time_ns()
            now_ms = self.sampled_ns // NS_PER_MS
            ticked = await read_ticked_nodes(self._bus, reader, every, since_ms=now_ms - _RECENT_MS)
            unresponsive = {
                last.partition
                for node, last in inventories.items()
                if last.gpu_count and key_in(*node).encode() not in ticked
            }
            ticked |= await read_ticked_nodes(
                self._bus, reader, unresponsive, since_ms=now_ms - UNRESPONSIVE_NS // NS_PER_MS
            )
        return inventories, {
            NodeId(*split_key(key.decode(errors="replace"))): record
            for key, record in ticked.items()
        }


async def check_nodes(bus: Bus, fleet: Fleet) -> list[Verdict]:
    """Check that every node with an inventory sends samples, and the reverse."""
    inventories, ticked = await fleet.read()
    _, watermarks = await read_watermarks(bus, "join")
    return judge_nodes(inventories, ticked, watermarks)


def judge_nodes(
    inventories: Mapping[NodeId, LastInventory],
    ticked: Collection[NodeId],
    watermarks: Iterable[Watermark],
) -> list[Verdict]:
    """Judge the nodes; the join's watermarks name the times since which nodes are unresponsive."""
    with_gpus = {node: last.gpu_count for node, last in inventories.items() if last.gpu_count}
    if not with_gpus and not ticked:
        return [
            problem(
                "no agent has published an inventory or a sample",
                "Start an agent on each GPU node, with the same kafka.topic_prefix.",
            )
        ]
    since_ns = {
        NodeId(watermark.cluster, node.node): node.since_time_ns
        for watermark in watermarks
        for node in watermark.unresponsive or ()
    }
    verdicts = []
    if unresponsive := sorted(with_gpus.keys() - set(ticked)):
        named = [
            f"{show_node(*node)} (since {write_moment(since_ns[node] // NS_PER_MS)})"
            if node in since_ns
            else show_node(*node)
            for node in unresponsive
        ]
        cluster, node = unresponsive[0]
        verdicts.append(
            problem(
                f"no sample for two minutes from {len(unresponsive)} of"
                f" {counted(len(with_gpus), 'node')}: {name_some(named)}",
                "Read the log and /readyz of their agents. For a decommissioned node, run"
                f" `gpuledger cluster retire {cluster} --node {node}`.",
            )
        )
    if unlisted := sorted(set(ticked) - with_gpus.keys()):
        verdicts.append(
            problem(
                f"samples, but no inventory, from {counted(len(unlisted), 'node')}, so bills do not"
                f" count idle GPUs: {name_some([show_node(*node) for node in unlisted])}",
                "Check the agent's permission to write the topic inventory, and its check `nvml`.",
            )
        )
    nodes, gpus = counted(len(with_gpus), "node"), counted(sum(with_gpus.values()), "GPU")
    return verdicts or [ok(f"inventory and samples from {nodes} with {gpus}")]


async def check_clocks(bus: Bus, fleet: Fleet, brokers: Inspector) -> list[Verdict]:
    """Compare the clocks of the nodes, the brokers and this machine."""
    _, ticked = await fleet.read()
    decoder = decoder_of(bus.topics.samples.name, NodeSample)
    offsets_ns, intervals_ns = {}, {}
    for node, record in ticked.items():
        try:
            sample = decoder.decode(record.value)
        except UndecodableError:
            continue
        offsets_ns[node] = sample.time_ns - fleet.sampled_ns
        intervals_ns[node] = sample.interval_ns
    of_nodes = judge_clocks(offsets_ns, intervals_ns)
    async with bus.reader() as reader:
        spans = await reader.spans(bus.topics.events.name)
    ends = {at.partition: span.end for at, span in spans.items() if span.end > span.first}
    times_ms = await brokers.read_marker_times_ms(bus.topics.events.name, ends) if ends else []
    return [*judge_own_clock(times_ms, now_ns=fleet.time_ns()), *of_nodes]


def judge_own_clock(marker_times_ms: Sequence[int], *, now_ns: int) -> list[Verdict]:
    """Compare this machine's clock with the newest of the markers, which the join writes often."""
    if not marker_times_ms:
        return [unknown("the join has written no event, so the brokers' clocks are unknown")]
    age_ns = now_ns - max(marker_times_ms) * NS_PER_MS
    if age_ns < -AHEAD_NS:
        return [
            problem(
                f"this machine's clock differs from the brokers' clocks by {_seconds(age_ns)}",
                "Synchronize the clock of this machine, or those of the brokers.",
            )
        ]
    if age_ns > BEHIND_NS:
        return [
            unknown(
                f"the join's newest commit is {age_ns // NS_PER_SECOND} s old by this machine's"
                " clock",
                "If the join runs, this machine's clock is ahead of the brokers' clocks.",
            )
        ]
    return [ok("this machine's clock agrees with the brokers' clocks")]


def judge_clocks(
    offsets_ns: Mapping[NodeId, int], intervals_ns: Mapping[NodeId, int]
) -> list[Verdict]:
    """Judge the time of each node's newest sample, relative to this machine's clock."""
    if not offsets_ns:
        return [unknown("no node has sent a sample within two minutes")]
    wrong = {
        node: offset
        for node, offset in offsets_ns.items()
        if offset > AHEAD_NS or offset < -BEHIND_NS - intervals_ns[node]
    }
    if not wrong:
        return [
            ok(
                f"the newest samples of {counted(len(offsets_ns), 'node')} have times from"
                f" {_seconds(min(offsets_ns.values()))} to {_seconds(max(offsets_ns.values()))}"
                " relative to this machine's clock"
            )
        ]
    named = name_some(
        [f"{show_node(*node)} {_seconds(offset)}" for node, offset in sorted(wrong.items())]
    )
    if len(wrong) == len(offsets_ns) > 1:
        return [
            problem(
                f"all nodes' newest samples differ from this machine's clock, by"
                f" {_seconds(round(median(wrong.values())))}: {named}",
                "Check this machine's clock first (`timedatectl`), and then Kafka's delay.",
            )
        ]
    return [
        problem(
            f"the newest sample of {len(wrong)} of {counted(len(offsets_ns), 'node')} differs from"
            f" this machine's clock: {named}",
            "Synchronize the nodes' clocks. If a clock is right, the agent's samples are late: read"
            " its check `kafka`.",
        )
    ]


def _seconds(offset_ns: int) -> str:
    return f"{offset_ns / NS_PER_SECOND:+.1f} s"


async def check_coverage(bus: Bus, fleet: Fleet, *, now_ns: int) -> list[Verdict]:
    """Sum the time of GPUs for which the newest complete minute of events has readings."""
    partitions, watermarks = await read_watermarks(bus, "join")
    if len({watermark.partition for watermark in watermarks}) < partitions:
        return [
            problem(
                "at least one partition has no watermark of the join",
                "Start the join. If it runs, read its failed checks in /readyz.",
            )
        ]
    # Each partition has its own last minute: a partition without nodes is two minutes behind.
    until_ns: dict[int, int] = {}
    for watermark in watermarks:
        time_ns = watermark.complete_until_ns
        until_ns[watermark.partition] = min(until_ns.get(watermark.partition, time_ns), time_ns)
    oldest_ns = min(until_ns.values())
    if now_ns - oldest_ns > JOIN_STALE_NS:
        return [
            problem(
                f"events are complete only through {write_moment(oldest_ns // NS_PER_MS)}",
                "Read the join's failed checks in /readyz. For a decommissioned cluster, run"
                " `gpuledger cluster retire`.",
            )
        ]
    inventories, _ = await fleet.read()
    covered_ns, windows_ns = await _read_covered(bus, until_ns)
    expected_ns = {
        node: last.gpu_count * windows_ns.get(node, COVERAGE_NS)
        for node, last in inventories.items()
    }
    return judge_coverage(covered_ns, expected_ns)


async def _read_covered(
    bus: Bus, until_ns: Mapping[int, int]
) -> tuple[dict[NodeId, int], dict[NodeId, int]]:
    """Return the known time of each node's GPUs, summed, and the checked time of each node.

    `until_ns` has the end of the checked time by partition. A node without events in the minute
    before has begun to send samples, and is checked from its first event on.
    """
    decoder = decoder_of(bus.topics.events.name, GpuEvent)
    covered_ns: dict[NodeId, int] = defaultdict(int)
    windows_ns: dict[NodeId, int] = defaultdict(int)
    async with bus.reader() as reader:
        for at, span in (await reader.spans(bus.topics.events.name)).items():
            end_ns = until_ns[at.partition]
            begins = await reader.offsets_at([at], (end_ns - 2 * COVERAGE_NS) // NS_PER_MS)
            async for records in reader.read(at, Span(max(span.first, begins[at]), span.end)):
                for record in records:
                    try:
                        event = decoder.decode(record.value)
                    except UndecodableError:
                        continue
                    node = NodeId(event.cluster, event.node)
                    covered_ns[node] += covered_in(event, until_ns=end_ns)
                    since_begin_ns = end_ns - event.time_ns + event.interval_ns
                    windows_ns[node] = max(windows_ns[node], min(since_begin_ns, COVERAGE_NS))
    return covered_ns, windows_ns


def covered_in(event: GpuEvent, *, until_ns: int) -> int:
    """Return the known time of an event's physical GPUs within the checked time, summed."""
    begin_ns = max(event.time_ns - event.interval_ns, until_ns - COVERAGE_NS)
    length_ns = max(0, min(event.time_ns, until_ns) - begin_ns)
    answering = {
        books.reading.parent_uuid or books.reading.uuid
        for books in event.gpus
        if books.gap_ns is None
    }
    return length_ns * len(answering)


def judge_coverage(
    covered_ns: Mapping[NodeId, int], expected_ns: Mapping[NodeId, int]
) -> list[Verdict]:
    """Compare the known time of each node's GPUs with that of the GPUs in its inventory."""
    if not expected_ns:
        return [unknown("no agent has published an inventory")]
    checked_ns = {node: time_ns for node, time_ns in expected_ns.items() if time_ns}
    if not checked_ns:
        return [unknown("no GPU has been sampled for a complete minute", "Try again in a minute.")]
    covered_ns = {
        node: min(covered_ns.get(node, 0), time_ns) for node, time_ns in checked_ns.items()
    }
    ratio = sum(covered_ns.values()) / sum(checked_ns.values())
    text = f"{ratio:.1%} of the GPUs' time is known in the last complete minute"
    if ratio >= MIN_COVERAGE_RATIO:
        return [ok(text)]
    ratios = {node: covered_ns[node] / time_ns for node, time_ns in checked_ns.items()}
    named = [
        f"{show_node(*node)} {ratios[node]:.0%}"
        for node in sorted(ratios, key=lambda node: ratios[node])
        if ratios[node] < MIN_COVERAGE_RATIO
    ]
    return [
        problem(
            f"only {text}: {name_some(named)}",
            "Read the checks `nvml`, `gpus` and `kafka` of these nodes' agents.",
        )
    ]
