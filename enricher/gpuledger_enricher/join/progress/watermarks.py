"""The last booked tick of each node, so that a tick that is read twice is booked only once.

This is the state of a worker's partitions. It is published with the events (`NodeProgress`), read
by the partition's next worker, and forgotten when the partition is revoked. This module itself does
not use the bus.
"""

from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Final

from gpuledger.bus.protocol import is_other_topic
from gpuledger.clock import NS_PER_DAY, NS_PER_MS
from gpuledger.completeness import MAX_AHEAD_NS, MAX_CLUSTERS
from gpuledger.keys import node_key, split_key
from gpuledger.records import NodeProgress, NodeSample
from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger_enricher.join.progress.passage import (
    UNRESPONSIVE_NS,
    BootWatermark,
    NodeWatermark,
    Reached,
    begin_of,
    clock_step_ns,
    find_reached,
    partition_watermark,
)

# Longer than samples are kept: ticks that were booked before cannot be read again.
FORGOTTEN_AFTER_NS: Final = NS_PER_DAY
NEWEST_BOOTS: Final = 4
"""Number of a node's newest boots that are kept. If a node rebooted with unsent ticks, a batch that
is sent twice may have ticks of several boots."""
LONGEST_BOOTS: Final = 4
"""Number of a node's older boots that are kept: those that have been booked for longest. The real
boot is among them, however many boots were forged since."""
MAX_NODES: Final = 20_000
"""Maximum number of nodes of one partition: several times the size of the largest clusters."""


class NodeWatermarks:
    """The watermarks of one partition's nodes, and the list of those that must be published.

    Memory is bounded by the nodes that sent ticks within a day.
    """

    def __init__(self) -> None:
        self._watermarks: dict[str, NodeWatermark] = {}
        self._advanced: dict[str, None] = {}
        self._reached_ns: int | None = None
        self._left_of_sweep = 0
        self._complete_until_ns: dict[str, int] = {}
        self._since_ns: int | None = None
        """When this worker started to read the partition, by the worker's clock."""
        self.topic_id: str | None = None
        """The id of the samples topic that is read now; `None` if it is unknown."""

    def __len__(self) -> int:
        return len(self._watermarks)

    def of(self, node: str) -> NodeWatermark | None:
        """Return the watermark of a node by key; `None` if no booked tick of the node is known."""
        return self._watermarks.get(node)

    def read_before(self) -> int | None:
        """Return the offset after the last tick that was read in the present topic.

        Returns `None` if no booked tick is known. Ticks of nodes without a booked tick do not
        count.

        If all nodes' ticks are of an earlier topic of the same name, no tick of the present topic
        was read, and the offset is 0.
        """
        if self.earlier_topic() is not None:
            return 0
        return _read_before(
            each
            for each in self._watermarks.values()
            if not is_other_topic(each.topic_id, self.topic_id)
        )

    def earlier_topic(self) -> tuple[str, int] | None:
        """Return the id of the topic that was recreated, and the offset after its last read tick.

        Returns `None` if a tick of the present topic was read, or if the ids are unknown.
        """
        known = [each for each in self._watermarks.values() if each.topic_id is not None]
        if not known or not all(is_other_topic(each.topic_id, self.topic_id) for each in known):
            return None
        topic_id = max(known, key=lambda each: each.last_seen_ns).topic_id
        offset = _read_before(each for each in known if each.topic_id == topic_id)
        return None if topic_id is None or offset is None else (topic_id, offset)

    def advance(self, sample: NodeSample, *, offset: int, written_ms: int, now_ns: int) -> None:
        """Record that a tick is booked; `written_ms` is the timestamp of the tick's record."""
        node = node_key(sample)
        begun_ns = begin_of(sample.seq, time_ns=min(written_ms * NS_PER_MS, now_ns))
        watermark = NodeWatermark(
            sample.boot_id, sample.seq, sample.time_ns, offset, now_ns, begun_ns, now_ns, now_ns
        )
        watermark.covered_from_ns = max(0, sample.time_ns - sample.interval_ns)
        watermark.topic_id = self.topic_id
        if known := self._watermarks.get(node):
            watermark = _after(known, watermark)
        elif len(self._watermarks) >= MAX_NODES:
            self._make_room()
        self._watermarks[node] = watermark
        self._advanced[node] = None
        self._left_of_sweep -= 1

    def skip(self, node: str, *, offset: int) -> None:
        """Record that a tick of a node was read but not booked.

        Does nothing if no tick of the node was booked before.
        """
        known = self._watermarks.get(node)
        if known and (offset > known.offset or is_other_topic(known.topic_id, self.topic_id)):
            known.offset, known.topic_id = offset, self.topic_id
            self._advanced[node] = None

    def reached_ns(self, now_ns: int) -> int | None:
        """Return the time that the partition has reached; `None` before its first tick.

        The time is computed again after as many ticks as there are nodes, because the cost is
        proportional to the number of nodes. Nodes without ticks for a day are then forgotten.
        """
        if self._left_of_sweep <= 0 and self._watermarks:
            self._reached_ns = partition_watermark(
                (watermark.time_ns for watermark in self._watermarks.values()), now_ns=now_ns
            )
            eldest_ns = now_ns - FORGOTTEN_AFTER_NS
            self._forget(
                [node for node, known in self._watermarks.items() if known.last_seen_ns < eldest_ns]
            )
            self._left_of_sweep = len(self._watermarks)
        return self._reached_ns

    def complete_until_ns(self, cluster: str) -> int:
        """Return the published watermark of a cluster, or 0; ticks before it are late."""
        return self._complete_until_ns.get(cluster, 0)

    def call_complete(self, cluster: str, until_ns: int) -> None:
        """Record a published watermark of a cluster; one with an earlier time is ignored."""
        self.add_cluster(cluster)
        if until_ns > self._complete_until_ns.get(cluster, until_ns):
            self._complete_until_ns[cluster] = until_ns

    def add_cluster(self, cluster: str) -> None:
        """Record that a cluster exists, even if none of its nodes is known."""
        if len(self._complete_until_ns) < MAX_CLUSTERS:
            self._complete_until_ns.setdefault(cluster, 0)

    def knows_cluster(self, cluster: str) -> bool:
        """Return whether the cluster is known to exist."""
        return cluster in self._complete_until_ns

    def find_complete(self, *, now_ns: int, is_at_end: bool) -> dict[str, Reached]:
        """Return, by cluster, the time through which the partition is complete.

        The time never decreases, unless the published one is over a minute ahead of the worker's
        clock. A cluster without nodes in this partition is as complete as the partition. The same
        applies to a cluster whose nodes are all unresponsive while nodes of other clusters send
        ticks, such as a removed cluster. If no cluster is known, the default cluster is reported,
        because an empty partition is complete too.

        The result has at most `MAX_CLUSTERS` clusters, those that have been known for longest.
        Otherwise, a writer that invents clusters could make the join publish a watermark for each
        of them every few seconds. `is_at_end` means that all records have been read. The cost is
        proportional to the number of nodes.
        """
        if self._since_ns is None:
            self._since_ns = now_ns
        how = {"now_ns": now_ns, "since_ns": self._since_ns}
        overall = find_reached(self._watermarks, is_at_end=is_at_end, **how)
        if overall is None:
            return {}
        nodes: dict[str, dict[str, NodeWatermark]] = {
            cluster: {} for cluster in self._complete_until_ns
        }
        for key, watermark in self._watermarks.items():
            nodes.setdefault(split_key(key)[0], {})[key] = watermark
        complete: dict[str, Reached] = {}
        newest_ns = max((each.last_seen_ns for each in self._watermarks.values()), default=0)
        for cluster, known in islice((nodes or {DEFAULT_CLUSTER: {}}).items(), MAX_CLUSTERS):
            last_seen_ns = max((each.last_seen_ns for each in known.values()), default=0)
            is_present = newest_ns - max(last_seen_ns, self._since_ns) < UNRESPONSIVE_NS
            found = None
            if known and (is_present or is_at_end):
                found = find_reached(known, is_at_end=is_at_end, **how)
            found = found or _all_unresponsive(known, until_ns=overall.until_ns)
            if self.complete_until_ns(cluster) > now_ns + MAX_AHEAD_NS:
                # Wrong: it was published because of a clock that ran ahead, or by a foreign writer.
                del self._complete_until_ns[cluster]
            self.call_complete(cluster, found.until_ns)
            until_ns = max(found.until_ns, self.complete_until_ns(cluster))
            complete[cluster] = found.raised_to(until_ns, known)
        return complete

    def restart_listening(self, now_ns: int) -> None:
        """Count time without ticks only from now on, because Kafka was unavailable before."""
        self._since_ns = now_ns

    def _make_room(self) -> None:
        """Forget 10 % of the nodes: those that have been booked for the shortest time.

        An attacker can forge thousands of names in a second. If the nodes with the oldest ticks
        were forgotten, these would be real nodes, because forged names are newer. But an attacker
        cannot forge the time for which a name has been booked, by the worker's clock. In this
        respect, a real node is ahead of all names that come later.
        """
        left = sorted(self._watermarks, key=lambda node: self._watermarks[node].known_for())
        self._forget(left[: MAX_NODES // 10])

    def _forget(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            del self._watermarks[node]
            # Writes a tombstone, so that workers that restore the progress forget the node too.
            self._advanced[node] = None

    def take(self, written: NodeProgress, *, last_seen_ns: int) -> None:
        """Restore a node's published progress, unless later progress of this boot is known."""
        before = tuple(
            BootWatermark(
                boot.boot_id,
                boot.seq,
                boot.begun_time_ns or 0,
                boot.first_booked_time_ns or last_seen_ns,
                boot.last_booked_time_ns or last_seen_ns,
                bool(boot.is_single),
                boot.time_ns,
                boot.covered_from_time_ns,
            )
            for boot in written.boots_before or ()
        )
        watermark = NodeWatermark(
            written.boot_id,
            written.seq,
            written.time_ns,
            written.offset,
            last_seen_ns,
            written.begun_time_ns or 0,
            written.first_booked_time_ns or last_seen_ns,
            last_seen_ns,
            single_time_ns=written.single_time_ns,
            covered_from_ns=written.covered_from_time_ns,
            topic_id=written.topic_id,
        )
        key = node_key(written)
        known = self._watermarks.get(key)
        # A compacted topic may still have several records of a node: the highest `seq` of a boot
        # counts, and a boot that is not known yet is newer than the known boot.
        known_boot = known.boot_of(watermark.boot_id) if known else None
        if known_boot is None or watermark.seq >= known_boot.seq:
            known_boots = (known.newest(), *known.before) if known else ()
            for boot in known_boots:
                if boot.boot_id == watermark.boot_id:
                    watermark.begun_ns = max(watermark.begun_ns, boot.begun_ns)
                    watermark.first_ns = min(watermark.first_ns, boot.first_ns)
            watermark.before = _kept(watermark, before, known_boots, now_ns=last_seen_ns)
            self._watermarks[key] = watermark
            # The lateness of the next tick depends on all restored nodes, not only on the first
            # one.
            self._left_of_sweep = 0

    def remove(self, node: str) -> None:
        """Forget a node by key; do nothing if the node is unknown."""
        self._watermarks.pop(node, None)
        self._advanced.pop(node, None)

    def drain(self) -> list[tuple[str, NodeWatermark | None]]:
        """Return the watermarks that changed since the last call, by node; `None` if forgotten."""
        advanced, self._advanced = self._advanced, {}
        return [(node, self._watermarks.get(node)) for node in advanced]


def _read_before(watermarks: Iterable[NodeWatermark]) -> int | None:
    return max((watermark.offset + 1 for watermark in watermarks), default=None)


def _after(known: NodeWatermark, tick: NodeWatermark) -> NodeWatermark:
    """Return a node's watermark after a tick was booked.

    A boot without booked ticks becomes the newest boot with its second tick, independent of the
    node's clock. A single tick may be forged or come from a broken agent, and does not show the
    node's progress. A late tick of an earlier boot advances only that boot. If the newest boot had
    no ticks for two minutes, any other boot becomes the newest one with its first tick.
    """
    if tick.boot_id == known.boot_id:
        tick.before = known.before
        tick.covered_from_ns = _covered_from_ns(known, tick)
        if known.begun_ns > tick.begun_ns:  # noqa: PLR1730 - max() costs three times as much, for each tick
            tick.begun_ns = known.begun_ns
        tick.first_ns = known.first_ns
        return tick
    other = known.other_boot(tick.boot_id)
    goes_on = other is not None and known.goes_on_with(other)
    if goes_on or tick.last_seen_ns - known.last_ns >= UNRESPONSIVE_NS:
        if other is not None:
            tick.begun_ns = max(tick.begun_ns, other.begun_ns)
            tick.first_ns = min(tick.first_ns, other.first_ns)
            tick.covered_from_ns = _covered_from_ns(other, tick)
        # Boots with a single tick came after the node's boot, and stay in front. So if boots were
        # booked for equally long, the oldest one is kept.
        went_on = [not boot.is_single for boot in known.before]
        place = went_on.index(True) if any(went_on) else len(went_on)
        before = [boot._replace(covered_from_ns=None) for boot in known.before]
        boots = (*before[:place], known.newest(), *before[place:])
        tick.before = _kept(tick, boots, now_ns=tick.last_seen_ns)
        return tick
    moved = tick.newest()
    # A boot without booked ticks is inserted first; an earlier boot is merged at its own place.
    if other is None:
        boots = (moved._replace(is_single=True), *known.before)
        known.single_time_ns = tick.time_ns
    else:
        boots = (*known.before, moved._replace(covered_from_ns=_covered_from_ns(other, tick)))
    known.before = _kept(known, boots, now_ns=tick.last_seen_ns)
    known.last_seen_ns = tick.last_seen_ns
    known.offset, known.topic_id = tick.offset, tick.topic_id
    return known


def _covered_from_ns(boot: NodeWatermark | BootWatermark, tick: NodeWatermark) -> int | None:
    """Return the start of the time that a boot covers, including this tick of the boot."""
    # Absent in progress of older versions.
    if boot.covered_from_ns is None or boot.time_ns is None:
        return tick.covered_from_ns
    time_ns = tick.time_ns - boot.time_ns
    if clock_step_ns(milliseconds=tick.seq - boot.seq, time_ns=time_ns):
        return tick.covered_from_ns
    return boot.covered_from_ns


def _all_unresponsive(nodes: Mapping[str, NodeWatermark], *, until_ns: int) -> Reached:
    """Return the state of a cluster whose nodes are all unresponsive: complete to `until_ns`."""
    unresponsive = sorted(
        ((key, each.time_ns) for key, each in nodes.items()), key=lambda one: -one[1]
    )
    return Reached(until_ns, len(nodes), unresponsive)


def _kept(
    newest: NodeWatermark, *known_boots: Iterable[BootWatermark], now_ns: int
) -> tuple[BootWatermark, ...]:
    """Return the boots other than the newest one, merged from all known data about them.

    If there are many, the newest boots are kept, and among the others those that have been booked
    for longest. A person who may write ticks can forge boots. If a real boot were forgotten, its
    old ticks would count as the ticks of a new boot. But a forger cannot change the time for which
    a boot has been booked, by the worker's clock. In this respect, the node's real boot is ahead of
    all boots that come later.
    """
    boots: dict[str, BootWatermark] = {}
    for boot in chain(*known_boots):
        other = boots.get(boot.boot_id, boot)
        last = boot if boot.seq > other.seq else other
        boots[boot.boot_id] = BootWatermark(
            boot.boot_id,
            max(boot.seq, other.seq),
            max(boot.begun_ns, other.begun_ns),
            min(boot.first_ns, other.first_ns),
            max(boot.last_ns, other.last_ns),
            boot.is_single and other.is_single,
            last.time_ns,
            last.covered_from_ns,
        )
    boots.pop(newest.boot_id, None)
    eldest_ns = now_ns - FORGOTTEN_AFTER_NS
    left = [boot for boot in boots.values() if boot.last_ns >= eldest_ns]
    if len(left) > NEWEST_BOOTS + LONGEST_BOOTS:
        older = sorted(left[NEWEST_BOOTS:], key=lambda boot: boot.booked_for_ns(now_ns))
        longest = {boot.boot_id for boot in older[-LONGEST_BOOTS:]}
        left = [
            boot
            for index, boot in enumerate(left)
            if index < NEWEST_BOOTS or boot.boot_id in longest
        ]
    return tuple(left)
