"""Detects duplicate and late ticks, gaps before ticks, and ticks whose `seq` runs ahead.

Pure functions of ticks and the watermarks of their nodes. The only clock used is the worker's; it
limits the times of the nodes.

How a `seq` that runs ahead is detected: `seq` is in milliseconds since the boot, so a tick's time
minus `seq` is the start of its boot. Two clocks give a tick's time:

- The timestamp of the record. The writer sets it, and brokers reject it if it is more than a day
  ahead (`gpuledger.topics`).
- The worker's clock when the worker reads the record, which is never before the tick.

The earlier of these two times gives a start that is too late by at most that day, plus the time for
which the tick waited on its node. The latest such start of all booked ticks is kept with the
watermark. The later of the two times gives a start that may be too late, but is never too early.

Suppose that the start from a tick's later time is more than `MAX_AHEAD_NS` before the kept start.
Then no node wrote this `seq`. The limit is a day, plus a day of waiting on the node. Late ticks,
gaps and clocks that are set shift the start in the other direction. So a genuine tick is rejected
only if two clocks are wrong at once.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

from gpuledger.clock import NS_PER_DAY, NS_PER_HOUR, NS_PER_MS, NS_PER_SECOND
from gpuledger.keys import split_key
from gpuledger.records import BootProgress, NodeProgress, NodeSample

LATE_SECONDS: Final = 30.0
"""A tick is late if it is further than this behind the time that its partition has reached."""
MIN_GAP_NS: Final = 50 * NS_PER_MS
"""Minimum time between two ticks that counts as a gap. Shorter times come from the imprecision of
clocks, which are read one after the other."""
UNRESPONSIVE_NS: Final = 120 * NS_PER_SECOND
"""A node counts as unresponsive if it is further than this behind the time that its partition has
reached. The join does not wait for unresponsive nodes."""
STEP_NS: Final = NS_PER_SECOND
"""Minimum time by which a clock must be set to count as stepped."""
# Two clocks of one machine drift apart by less than one part in this number.
_DRIFT: Final = 1000
_LATE_NS: Final = round(LATE_SECONDS * NS_PER_SECOND)
# The agent's `spool.max_age_seconds` limits how long a tick waits on its node: an hour by default,
# 30 days at most. Two limits here depend on this setting:
# - A node counts as away after an hour without ticks, the default of this setting. If ticks wait
#   longer on a node, the node does not influence its partition, but all its ticks are accepted.
# - `seq` may appear to run ahead by up to a day of waiting. With a longer spool, ticks are lost
#   only if the node's clock is a day ahead as well (docs/concepts/clocks.md).
_AWAY_NS: Final = NS_PER_HOUR
_ON_NODE_NS: Final = NS_PER_DAY
# Brokers accept timestamps up to this far ahead of the broker's clock (`gpuledger.topics`).
_REPORTED_AHEAD_NS: Final = NS_PER_DAY
MAX_AHEAD_NS: Final = _REPORTED_AHEAD_NS + _ON_NODE_NS
"""Maximum time by which the `seq` of a genuine sample may appear to run ahead, if at least one of
the two clocks is right."""


class BootWatermark(NamedTuple):
    """The start and the last booked tick of one boot of a node."""

    boot_id: str
    """The kernel's id of the boot."""
    seq: int
    """The number of the boot's last booked tick, in milliseconds since the start of the boot."""
    begun_ns: int
    """Start of the boot, in nanoseconds since the epoch. Each booked tick gives a start, from the
    earlier of the record's timestamp and the worker's clock; this is the latest one."""
    first_ns: int
    """When the boot's first tick was booked, by the worker's clock."""
    last_ns: int
    """When the boot's last tick was booked, by the worker's clock."""
    is_single: bool = False
    """Whether only one tick of the boot is booked, and this tick came while another boot was
    running."""
    time_ns: int | None = None
    """End of the boot's last booked tick, in nanoseconds since the epoch."""
    covered_from_ns: int | None = None
    """Start of the time that the boot has covered since the newest boot began, see `overlaps`;
    `None` if the boot was not booked since then."""

    def booked_for_ns(self, now_ns: int) -> int:
        """Return for how long the boot has been booked.

        The time starts with the first booked tick. It ends at `now_ns`, but at the latest an hour
        after the last booked tick.
        """
        return min(now_ns, self.last_ns + _AWAY_NS) - self.first_ns


class NodeWatermark(msgspec.Struct, gc=False):
    """The last booked tick of a node. A Struct, because one is created for each tick."""

    boot_id: str
    """The kernel's id of the newest boot with more than a single tick."""
    seq: int
    """The tick's number within the boot: milliseconds since its start."""
    time_ns: int
    """End of the tick, in nanoseconds since the epoch."""
    offset: int
    """The highest offset of the node's ticks that were read, even if they were not booked."""
    last_seen_ns: int
    """When a worker last read a tick of the node, by the worker's clock."""
    begun_ns: int
    """Start of the boot, in nanoseconds since the epoch. Each booked tick gives a start, from the
    earlier of the record's timestamp and the worker's clock; this is the latest one."""
    first_ns: int
    """When the first tick of the boot was booked, by the worker's clock."""
    last_ns: int
    """When the last tick of the boot was booked, by the worker's clock."""
    before: tuple[BootWatermark, ...] = ()
    """The few other boots that are kept, the newest first."""
    single_time_ns: int | None = None
    """Time of a later tick that is the only tick of another boot; `None` if there is none."""
    covered_from_ns: int | None = None
    """Start of the time that the newest boot covers, see `overlaps`; `None` in progress of older
    versions."""
    topic_id: str | None = None
    """The id of the topic that `offset` belongs to; `None` if it is unknown."""

    def newest(self) -> BootWatermark:
        """Return the progress of the newest boot in the form that is kept of earlier boots.

        Without `covered_from_ns`: time that was covered before the next boot began does not count.
        """
        return BootWatermark(
            self.boot_id,
            self.seq,
            self.begun_ns,
            self.first_ns,
            self.last_ns,
            time_ns=self.time_ns,
        )

    def goes_on_with(self, boot: BootWatermark) -> bool:
        """Return whether the next tick of one of the other boots makes that boot the newest one.

        Its second tick does, unless a tick of the newest boot was booked between its two ticks. If
        one was booked, two machines write as one node.
        """
        return boot.is_single and self.single_time_ns is not None

    def last_time_ns(self) -> int:
        """Return the time of the tick booked last, even if its boot has no other tick.

        Late ticks of earlier boots do not count.
        """
        return self.time_ns if self.single_time_ns is None else self.single_time_ns

    def known_for(self) -> tuple[int, int]:
        """Return a key that sorts nodes by how long they have been booked, over all kept boots.

        If two nodes have been booked for equally long, the node whose last tick is older comes
        first.
        """
        first_ns = min((boot.first_ns for boot in self.before), default=self.first_ns)
        return self.last_seen_ns - min(first_ns, self.first_ns), self.last_seen_ns

    def progress_of(self, key: str) -> NodeProgress:
        """Return the record from which the partition's next worker restores this watermark."""
        cluster, node = split_key(key)
        return NodeProgress(
            cluster=cluster,
            node=node,
            boot_id=self.boot_id,
            seq=self.seq,
            time_ns=self.time_ns,
            offset=self.offset,
            topic_id=self.topic_id,
            begun_time_ns=self.begun_ns,
            first_booked_time_ns=self.first_ns,
            single_time_ns=self.single_time_ns,
            covered_from_time_ns=self.covered_from_ns,
            boots_before=[
                BootProgress(
                    boot_id=boot.boot_id,
                    seq=boot.seq,
                    begun_time_ns=boot.begun_ns,
                    first_booked_time_ns=boot.first_ns,
                    last_booked_time_ns=boot.last_ns,
                    is_single=boot.is_single or None,
                    time_ns=boot.time_ns,
                    covered_from_time_ns=boot.covered_from_ns,
                )
                for boot in self.before
            ]
            or None,
        )

    def boot_of(self, boot_id: str) -> "NodeWatermark | BootWatermark | None":
        """Return the watermark of a boot; `None` if no tick of the boot is known."""
        return self if boot_id == self.boot_id else self.other_boot(boot_id)

    def other_boot(self, boot_id: str) -> BootWatermark | None:
        """Return the watermark of a boot other than the newest one."""
        return next((boot for boot in self.before if boot.boot_id == boot_id), None)


def is_duplicate(sample: NodeSample, watermark: NodeWatermark | None) -> bool:
    """Return whether this tick was booked before.

    `seq` rises within a boot, even if the agent restarts. A boot without booked ticks is new, so no
    ticks are lost if a clock is set back or a topic is recreated.
    """
    boot = watermark.boot_of(sample.boot_id) if watermark else None
    return boot is not None and sample.seq <= boot.seq


def gap_before_ns(sample: NodeSample, watermark: NodeWatermark | None) -> int | None:
    """Return the time between the previous booked tick and the start of this one, in nanoseconds.

    Within a boot, the time is measured by `seq`, the milliseconds since boot, which cannot be set.
    Between boots, it is measured by the node's clock and includes the node's downtime. Return
    `None` if there is no gap, or if no booked tick of the node is known.
    """
    if watermark is None:
        return None
    boot = watermark.boot_of(sample.boot_id)
    # Earlier boots too: a late tick of an earlier boot may come after the next boot's first tick.
    if boot is not None:
        gap_ns = (sample.seq - boot.seq) * NS_PER_MS - sample.interval_ns
    else:
        gap_ns = sample.time_ns - sample.interval_ns - watermark.last_time_ns()
    return gap_ns if gap_ns > MIN_GAP_NS else None


def clock_step_seconds(sample: NodeSample, watermark: NodeWatermark | None) -> float | None:
    """Return by how many seconds the node's clock was set since the previous booked tick.

    Within a boot, the result is the change of the node's time minus the change of `seq`. Between
    boots, a step is detected only if the later boot begins before the earlier boot's last tick.
    Return `None` if no step is detected.
    """
    if watermark is None:
        return None
    if sample.boot_id == watermark.boot_id:
        step_ns = clock_step_ns(
            milliseconds=sample.seq - watermark.seq, time_ns=sample.time_ns - watermark.time_ns
        )
    elif watermark.other_boot(sample.boot_id) is None:
        back_ns = watermark.last_time_ns() - (sample.time_ns - sample.seq * NS_PER_MS)
        step_ns = -back_ns if back_ns > STEP_NS else 0
    else:
        # A late tick of an earlier boot: no clock measures how long the node was down.
        return None
    return step_ns / NS_PER_SECOND if step_ns else None


def clock_step_ns(*, milliseconds: int, time_ns: int) -> int:
    """Return by how much a node's clock was set between two ticks of one boot; 0 if it was not.

    The ticks are `milliseconds` apart by `seq`, and `time_ns` by the node's clock. Over days
    without ticks, the two clocks drift apart even if they are not set.
    """
    passed_ns = milliseconds * NS_PER_MS
    step_ns = time_ns - passed_ns
    return step_ns if abs(step_ns) > STEP_NS + passed_ns // _DRIFT else 0


def begin_of(seq: int, *, time_ns: int) -> int:
    """Return the start of a boot, given the `seq` of one of its ticks and the time of that tick."""
    return max(0, time_ns - seq * NS_PER_MS)


def seq_ahead_seconds(
    sample: NodeSample, watermark: NodeWatermark | None, *, written_ms: int, now_ns: int
) -> float | None:
    """Return by how many seconds a tick's `seq` runs ahead; `None` if it is at most a day.

    The result is the known start of the boot minus the start that this tick gives. The tick's time
    is the later of `written_ms`, the record's timestamp, and `now_ns`, the worker's clock.
    """
    boot = watermark.boot_of(sample.boot_id) if watermark else None
    if boot is None:
        return None
    ahead_ns = boot.begun_ns - (max(written_ms * NS_PER_MS, now_ns) - sample.seq * NS_PER_MS)
    return ahead_ns / NS_PER_SECOND if ahead_ns > _REPORTED_AHEAD_NS else None


def is_late(time_ns: int, reached_ns: int | None) -> bool:
    """Return whether a tick is late in its partition; `False` if the reached time is unknown."""
    return reached_ns is not None and reached_ns - time_ns > _LATE_NS


class Reached(NamedTuple):
    """The event time through which all nodes are booked, except the unresponsive nodes."""

    until_ns: int
    """Time before which all responsive nodes are complete."""
    node_count: int
    """Number of nodes, including unresponsive ones."""
    unresponsive: list[tuple[str, int]]
    """Unresponsive nodes with the ends of their last ticks, the newest tick first."""

    def raised_to(self, until_ns: int, nodes: Mapping[str, NodeWatermark]) -> "Reached":
        """Return a copy with the later time `until_ns`, which was published before.

        Nodes whose newest tick is before `until_ns` are added to the unresponsive nodes. They were
        unresponsive when that time was published, and have returned with earlier ticks.
        """
        named = dict(self.unresponsive)
        left = {name: known.time_ns for name, known in nodes.items() if known.time_ns < until_ns}
        unresponsive = sorted((left | named).items(), key=itemgetter(1), reverse=True)
        return self._replace(until_ns=until_ns, unresponsive=unresponsive)


def find_reached(
    nodes: Mapping[str, NodeWatermark], *, now_ns: int, is_at_end: bool, since_ns: int = 0
) -> Reached | None:
    """Return the time through which one cluster's nodes are complete in a partition.

    A node's ticks come in order, so all nodes are complete up to the newest tick of the slowest
    responsive node. Return `None` if no node is known and records remain to be read.

    `is_at_end` means that all records have been read. Then the worker's clock decides which nodes
    are unresponsive, and a partition without responsive nodes is complete up to two minutes ago.

    Otherwise the remaining records may cover hours, and a node is unresponsive in two cases:

    - The worker read the node's last tick two minutes before a tick of another node.
    - The node's newest tick is two minutes older than those of at least half of the nodes.

    So a single clock that runs ahead does not make nodes unresponsive whose ticks have not been
    read yet. The worker started to read at `since_ns`, by its clock; earlier time without ticks
    does not count.
    """
    times = {name: min(known.time_ns, now_ns) for name, known in nodes.items()}
    last_seen = {name: max(known.last_seen_ns, since_ns) for name, known in nodes.items()}
    if is_at_end:
        present = {
            name
            for name, last_seen_ns in last_seen.items()
            if now_ns - last_seen_ns < UNRESPONSIVE_NS
        }
        reached_ns = partition_watermark(times.values(), now_ns=now_ns) if times else 0
    elif times:
        newest_ns = max(last_seen.values())
        present = {
            name
            for name, last_seen_ns in last_seen.items()
            if newest_ns - last_seen_ns < UNRESPONSIVE_NS
        }
        reached_ns = sorted(map(times.__getitem__, present))[(len(present) - 1) // 2]
    else:
        return None
    present = {name for name in present if times[name] >= reached_ns - UNRESPONSIVE_NS}
    until_ns = min((times[name] for name in present), default=now_ns - UNRESPONSIVE_NS)
    unresponsive = [(name, time_ns) for name, time_ns in times.items() if name not in present]
    unresponsive.sort(key=itemgetter(1), reverse=True)
    return Reached(until_ns, len(times), unresponsive)


def partition_watermark(newest_ns: Iterable[int], *, now_ns: int) -> int:
    """Return the time that a partition has reached, from the newest tick of each of its nodes.

    A tenth of the nodes are past this time, so a few clocks that run ahead do not make other nodes
    late. With fewer than ten nodes, it is the newest tick of all nodes. The time is never after
    `now_ns`. Nodes that are an hour behind the newest tick do not count.
    """
    # Clocks that run ahead are limited to the worker's time, so they do not make other nodes late.
    times = sorted(min(time_ns, now_ns) for time_ns in newest_ns)
    present = times[bisect_left(times, times[-1] - _AWAY_NS) :]
    return present[-1 - len(present) // 10]
