"""Where a tick lies in its node's time: booked before or not, late or not, behind a gap.

Pure functions of ticks and watermarks; the only clock is the one that bounds the nodes' own.

Whether `seq` runs ahead. `seq` is milliseconds since the boot, so each tick says when its boot
began: so long before it. Two clocks tell when the tick was: the record's timestamp, which its
writer sets and no broker takes where it is more than a day ahead (`gpuledger.topics`), and the
worker's, which reads a record once it is there and not before. The earlier of them puts the begin
too late by no more than that day and the time for which the tick lay on its node; the latest begin
that a booked tick put so is kept with the watermark. The later of them puts it too late by any time
and too early by none. So a tick that puts its boot's begin earlier than is kept by more than
`MAX_AHEAD_NS`, a day and another one for which ticks lie on a node, has a `seq` that no node wrote.
What comes late, gaps of any length and clocks that are set move the two apart in the other
direction: for an honest tick to be refused, two clocks must be wrong at once.
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
"""A tick that is further than this behind what its partition has reached is late."""
MIN_GAP_NS: Final = 50 * NS_PER_MS
"""Less than this between two ticks is the clocks' own imprecision, read one after the other."""
UNRESPONSIVE_NS: Final = 120 * NS_PER_SECOND
"""A node that is further than this behind what its partition has reached is not waited for."""
_STEP_NS: Final = NS_PER_SECOND
# Two clocks of one machine drift apart by less than a thousandth.
_DRIFT: Final = 1000
_LATE_NS: Final = round(LATE_SECONDS * NS_PER_SECOND)
# How long a tick may lie on its node is the agent's `spool.max_age_seconds`: an hour by default, 30
# days at most. Two bounds here follow from it:
# - the default is the silence after which a node is away. One whose ticks lay for longer is no
#   measure of its partition meanwhile, and nothing of it is refused;
# - a day of it is what `seq` may seem to run ahead by for it. Who allows more loses ticks only
#   where the node's clock is a day ahead as well (docs/operations.md, "A tick that ran ahead").
_AWAY_NS: Final = NS_PER_HOUR
_ON_NODE_NS: Final = NS_PER_DAY
# As far as a broker lets a record's timestamp run ahead of its clock (`gpuledger.topics`).
_REPORTED_AHEAD_NS: Final = NS_PER_DAY
MAX_AHEAD_NS: Final = _REPORTED_AHEAD_NS + _ON_NODE_NS
"""By more than this no honest tick runs ahead while one of two clocks is right."""


class BootWatermark(NamedTuple):
    """How far an earlier boot of a node is booked."""

    boot_id: str
    """The kernel's id of the boot."""
    seq: int
    """The number of its last tick that was booked."""
    begun_ns: int
    """The latest begin of the boot that a booked tick has put, by the earlier of two clocks."""
    first_ns: int
    """When the first of its ticks was booked, by the worker's clock."""
    last_ns: int
    """When the last of them was, by the worker's clock."""
    is_single: bool = False
    """Whether one tick of it is booked alone, which came while another boot was going on."""

    def booked_for_ns(self, now_ns: int) -> int:
        """Return for how long the boot has been booked; up to an hour of silence is part of it."""
        return min(now_ns, self.last_ns + _AWAY_NS) - self.first_ns


class NodeWatermark(msgspec.Struct, gc=False):
    """The last tick of a node that was booked; a Struct, because one is made for each tick."""

    boot_id: str
    """The kernel's id of the newest boot, of those that went on."""
    seq: int
    """The tick's number within the boot: milliseconds since it."""
    time_ns: int
    """End of what the tick covers, since the epoch."""
    offset: int
    """Where the tick lies in its partition."""
    last_seen_ns: int
    """When a worker last heard of the node, by its own clock."""
    begun_ns: int
    """The latest begin of the boot that a booked tick has put, by the earlier of two clocks."""
    first_ns: int
    """When the first tick of the boot was booked, by the worker's clock."""
    last_ns: int
    """When the last of them was, by the worker's clock."""
    before: tuple[BootWatermark, ...] = ()
    """The few other boots, the newest first."""
    single_time_ns: int | None = None
    """Where a tick of a boot that has not gone on came behind all of these: its time."""

    def newest(self) -> BootWatermark:
        """Return how far its newest boot is booked."""
        return BootWatermark(self.boot_id, self.seq, self.begun_ns, self.first_ns, self.last_ns)

    def last_time_ns(self) -> int:
        """Return the time of its last tick that was booked in order, of a boot that went on or not.

        Late ticks of earlier boots are not meant.
        """
        return self.time_ns if self.single_time_ns is None else self.single_time_ns

    def known_for(self) -> tuple[int, int]:
        """Rank the node by for how long it has been booked, all boots that are kept of it together.

        Of those that were for as long, whoever was not heard of for longest comes first.
        """
        first_ns = min((boot.first_ns for boot in self.before), default=self.first_ns)
        return self.last_seen_ns - min(first_ns, self.first_ns), self.last_seen_ns

    def progress_of(self, key: str) -> NodeProgress:
        """Return it as the record from which the partition's next worker restores it."""
        cluster, node = split_key(key)
        return NodeProgress(
            cluster=cluster,
            node=node,
            boot_id=self.boot_id,
            seq=self.seq,
            time_ns=self.time_ns,
            offset=self.offset,
            begun_time_ns=self.begun_ns,
            first_booked_time_ns=self.first_ns,
            single_time_ns=self.single_time_ns,
            boots_before=[
                BootProgress(
                    boot_id=boot.boot_id,
                    seq=boot.seq,
                    begun_time_ns=boot.begun_ns,
                    first_booked_time_ns=boot.first_ns,
                    last_booked_time_ns=boot.last_ns,
                    is_single=boot.is_single or None,
                )
                for boot in self.before
            ]
            or None,
        )

    def seq_of(self, boot_id: str) -> int | None:
        """Return how far a boot is booked, `None` where nothing of it is known to be."""
        if boot_id == self.boot_id:
            return self.seq
        return next((boot.seq for boot in self.before if boot.boot_id == boot_id), None)

    def begun_ns_of(self, boot_id: str) -> int | None:
        """Return when a boot began by what is kept of it; `None` where nothing of it is booked."""
        if boot_id == self.boot_id:
            return self.begun_ns
        return next((boot.begun_ns for boot in self.before if boot.boot_id == boot_id), None)


def is_duplicate(sample: NodeSample, watermark: NodeWatermark | None) -> bool:
    """Return whether this tick was booked before.

    `seq` rises within a boot, restarts of the agent included. A boot of which nothing was booked is
    a new one: neither a clock that was set back nor a topic made anew may cost its ticks.
    """
    seq = watermark.seq_of(sample.boot_id) if watermark else None
    return seq is not None and sample.seq <= seq


def gap_before_ns(sample: NodeSample, watermark: NodeWatermark | None) -> int | None:
    """Return the time between the tick booked before and this one's begin, if there is any.

    Within a boot by `seq`, the milliseconds since boot, which no one can set. Across a boot by the
    node's clock, so that the time in which it was down is in it. `None` where no tick is known to
    have been booked before, and where the ticks meet.
    """
    if watermark is None:
        return None
    seq = watermark.seq_of(sample.boot_id)
    # Also of an earlier boot, of which a late tick may come behind the next boot's first one.
    if seq is not None:
        gap_ns = (sample.seq - seq) * NS_PER_MS - sample.interval_ns
    else:
        gap_ns = sample.time_ns - sample.interval_ns - watermark.last_time_ns()
    return gap_ns if gap_ns > MIN_GAP_NS else None


def overlap_before_ns(sample: NodeSample, watermark: NodeWatermark | None) -> int | None:
    """Return how much of a tick lies in the one of its boot that was booked before, if any does.

    No agent writes such ticks: two write as one node, whose time is booked twice then.
    """
    seq = watermark.seq_of(sample.boot_id) if watermark else None
    if seq is None:
        return None
    overlap_ns = sample.interval_ns - (sample.seq - seq) * NS_PER_MS
    return overlap_ns if overlap_ns > MIN_GAP_NS else None


def clock_step_seconds(sample: NodeSample, watermark: NodeWatermark | None) -> float | None:
    """Return by how much the node's clock was set since the tick that was booked before.

    Within a boot as far as its time and `seq` differ in what passed; across boots it shows only
    where the later boot begins before the earlier one's last tick. `None` where nothing shows.
    """
    if watermark is None:
        return None
    time_ns = sample.time_ns - watermark.time_ns
    if sample.boot_id == watermark.boot_id:
        passed_ns = (sample.seq - watermark.seq) * NS_PER_MS
        step_ns = time_ns - passed_ns
        # Over a silence of days the two clocks drift apart without anybody's setting one.
        min_ns = _STEP_NS + passed_ns // _DRIFT
    elif watermark.seq_of(sample.boot_id) is None:
        time_ns = sample.time_ns - watermark.last_time_ns()
        step_ns = min(0, time_ns - sample.seq * NS_PER_MS)
        min_ns = _STEP_NS
    else:
        # A late tick of an earlier boot: how long the node was down is in no clock.
        return None
    return step_ns / NS_PER_SECOND if abs(step_ns) > min_ns else None


def begin_of(seq: int, *, time_ns: int) -> int:
    """Return when the boot began of which a tick was the `seq`-th millisecond at that time."""
    return max(0, time_ns - seq * NS_PER_MS)


def seq_ahead_seconds(
    sample: NodeSample, watermark: NodeWatermark | None, *, written_ms: int, now_ns: int
) -> float | None:
    """Return by how many seconds a tick runs ahead of its boot; `None` for up to a day.

    Both clocks are asked: `written_ms` is the record's timestamp, `now_ns` the worker's time.
    """
    begun_ns = watermark.begun_ns_of(sample.boot_id) if watermark else None
    if begun_ns is None:
        return None
    ahead_ns = begun_ns - (max(written_ms * NS_PER_MS, now_ns) - sample.seq * NS_PER_MS)
    return ahead_ns / NS_PER_SECOND if ahead_ns > _REPORTED_AHEAD_NS else None


def is_late(time_ns: int, reached_ns: int | None) -> bool:
    """Return whether a tick is behind what its partition has reached; never if that is unknown."""
    return reached_ns is not None and reached_ns - time_ns > _LATE_NS


class Reached(NamedTuple):
    """Up to which event time all nodes are booked, and the unresponsive nodes left out of it."""

    until_ns: int
    """The time up to which no node that is not unresponsive has more to come."""
    node_count: int
    """How many nodes there are, unresponsive ones included."""
    unresponsive: list[tuple[str, int]]
    """The unresponsive ones, each with the end of its last tick, the newest first."""

    def raised_to(self, until_ns: int, nodes: Mapping[str, NodeWatermark]) -> "Reached":
        """Return the same up to the later time that was published before.

        Who was unresponsive then and has come back behind that time is left out by it as before.
        """
        named = dict(self.unresponsive)
        left = {name: known.time_ns for name, known in nodes.items() if known.time_ns < until_ns}
        unresponsive = sorted((left | named).items(), key=itemgetter(1), reverse=True)
        return self._replace(until_ns=until_ns, unresponsive=unresponsive)


def find_reached(
    nodes: Mapping[str, NodeWatermark], *, now_ns: int, is_at_end: bool, since_ns: int = 0
) -> Reached | None:
    """Return how far nodes of one cluster are complete in a partition, by their newest ticks.

    Their ticks come in their order, so the hindmost of those that are not unresponsive is how far
    all are. `is_at_end` says that nothing is left to be read: then it shows by our own clock who is
    unresponsive, and only then is a partition, of which nobody is heard, complete up to where they
    would be. `None` where nothing is known.

    While something is left to be read, it may be the ticks of hours. Then somebody is unresponsive
    where others were heard for two minutes of our own clock, or who is two minutes behind at least
    half of the others: one clock that runs ahead makes nobody unresponsive whose ticks are still to
    be read. Since `since_ns` by our own clock is listened to them all: before, nobody was
    unresponsive.
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
    """Return the time that a partition has reached, from each of its nodes' newest tick.

    It is what one node in ten has passed (in a partition of up to nine nodes: the foremost), so
    that a few clocks that run ahead make nobody late, and never after `now_ns`. Nodes that have
    been unresponsive for an hour do not count. A node that is alone is the measure of itself.
    """
    # A clock that runs ahead counts as right, so that it cannot make all others late.
    times = sorted(min(time_ns, now_ns) for time_ns in newest_ns)
    present = times[bisect_left(times, times[-1] - _AWAY_NS) :]
    return present[-1 - len(present) // 10]
