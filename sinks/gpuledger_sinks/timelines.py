"""Where a tick stands in its node's time, and whether it was seen before.

A restarted join may publish a tick twice, which is recognised by (cluster, node, boot, seq):
`SeenTicks` is for sinks that keep no other state of a node. What was seen is kept in memory, for
the life of a consumer's assignment and for nodes that were heard of within a day; the store sink
writes it down beside its tables, so that it outlives the assignment (`gpuledger_sinks.store.seen`).

`Timelines` is for sinks that keep a state of each node. A node's wall clock can be set at any
moment, forth or back, and may be wrong after a reboot; so what is new, and how much time passed, is
read from `(boot_id, seq)` alone: `seq` is milliseconds since boot, which nobody can set. Wall
clocks decide one thing only: which of two boots came first, where ticks of both arrive (a spool may
bring those of the earlier boot late). A wrong decision is made good after `_OVER_AFTER_NS`, as two
boots of a node are never both alive.

That minute is of this machine's time, by when ticks arrive: events carry no time but their node's,
Kafka's timestamp of them is the same one, and by `seq` a spool that drains looks like a boot that
lives. So it is the one thing here that a replay of the same events may decide otherwise.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

from gpuledger.bus.protocol import TopicPartition
from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS, NS_PER_SECOND, Clock
from gpuledger.keys import node_key
from gpuledger.recent import Recent
from gpuledger.records import GpuEvent, NodeReadings

TickRecord = GpuEvent | NodeReadings
"""What says of which tick of a node it is, and when that was."""
MAX_SEEN_BOOTS: Final = 5
"""Boots of a node, those heard of last: a spool may bring ticks of earlier ones late.

Fewer than the join remembers, which keeps the longest ones as well.
"""


_NONE_SEEN: Final[Mapping[str, int]] = MappingProxyType({})


class SeenBoots:
    """How far the few boots of a node that were heard of last were seen; never by a clock."""

    __slots__ = ("_seqs",)

    def __init__(self, seqs: Mapping[str, int] = _NONE_SEEN) -> None:
        """Go on from the last tick that was seen of each boot, that of the last one at the end."""
        self._seqs = dict(seqs)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield the boots with the last tick seen of each, the one that was heard of last last."""
        return iter(self._seqs.items())

    def __reversed__(self) -> Iterator[str]:
        """Yield the boots, the one that was heard of last first."""
        return reversed(self._seqs)

    def is_new(self, event: TickRecord) -> bool:
        """Return whether the tick is beyond what was seen of its boot, and remember it."""
        boot_id, seq = event.boot_id, event.seq
        # `seq` never falls within a boot, and a node's ticks come in the order of their partition:
        # what is not beyond the last one was published before.
        if seq <= self._seqs.get(boot_id, -1):
            return False
        # Put last, so that the boot that was heard of longest ago is first.
        self._seqs.pop(boot_id, None)
        self._seqs[boot_id] = seq
        if len(self._seqs) > MAX_SEEN_BOOTS:
            self._seqs.pop(next(islice(self._seqs, 1)))
        return True


class SeenTicks:
    """The ticks seen of each node; one node's ticks always come in one partition."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._nodes: dict[TopicPartition, Recent[str, SeenBoots]] = {}

    def is_new(self, partition: TopicPartition, event: GpuEvent) -> bool:
        """Return whether the tick is beyond what was seen of its node's boot, and remember it."""
        if (nodes := self._nodes.get(partition)) is None:
            nodes = self._nodes[partition] = Recent()
        nodes.go_on(self._clock.monotonic_ns())
        node = node_key(event)
        if (boots := nodes.get(node)) is None:
            boots = nodes[node] = SeenBoots()
        return boots.is_new(event)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget partitions that are read by somebody else, or again."""
        for partition in partitions:
            self._nodes.pop(partition, None)

    def state_of(self, partition: TopicPartition) -> dict[str, list[tuple[str, int]]]:
        """Return what was seen of a partition's nodes, as JSON has it."""
        nodes = self._nodes.get(partition)
        return {} if nodes is None else {node: list(boots) for node, boots in nodes.items()}

    def restore(
        self, partition: TopicPartition, state: Mapping[str, Iterable[tuple[str, int]]]
    ) -> None:
        """Go on from what was seen of a partition's nodes, as if it had been seen now."""
        nodes = self._nodes[partition] = Recent()
        nodes.go_on(self._clock.monotonic_ns())
        for node, boots in state.items():
            nodes[node] = SeenBoots(dict(boots))


_OVER_AFTER_NS: Final = NS_PER_MINUTE
"""A boot of which nothing has arrived for so long gives way to one whose ticks are stamped earlier:
that boot is the later one then, and its clock is behind."""
LEAP_NS: Final = 10 * NS_PER_SECOND
"""Clocks that differ by less agree, as far as a sink is concerned."""
_TRIAL_MS: Final = 60_000
"""For how long of the node's time a clock that leapt ahead is on trial."""


class TickOrder(Enum):
    """Where a tick stands among those of its node."""

    CURRENT = "current"
    """The newest tick of the boot that is at work."""
    REPEATED = "repeated"
    """It was seen before."""
    SUPERSEDED = "superseded"
    """It is of a boot that another one has followed: what it says is past."""


class Arrival(NamedTuple):
    """A tick's place, and whether to believe its time."""

    order: TickOrder
    has_leapt: bool
    """Whether the node's clock leapt ahead less than a minute before: it may be set back soon."""


class Timeline:
    """The time of one node, as its ticks have it."""

    __slots__ = (
        "_boot_id",
        "_boots",
        "_leapt_seq",
        "_offset_ns",
        "_seq",
        "_time_ns",
        "received_ns",
    )

    def __init__(
        self, seqs: Mapping[str, int] = _NONE_SEEN, *, time_ns: int = 0, received_ns: int = 0
    ) -> None:
        """Go on from the last tick that was seen of each boot, and the time of the newest.

        The boot at work is at the end, as if that tick had come at `received_ns`.
        """
        self._boots = SeenBoots(seqs)
        self._boot_id = next(reversed(self._boots), "")
        self._seq = seqs.get(self._boot_id, 0)
        self._time_ns = time_ns
        self.received_ns = received_ns
        """When a tick of the boot at work came, by the clock that is never set."""
        self._offset_ns = 0
        self._leapt_seq: int | None = None

    @property
    def behind_ns(self) -> int:
        """How far the node's clock was seen to be set back, at least."""
        return max(0, -self._offset_ns)

    def observe(self, event: TickRecord, *, received_ns: int) -> Arrival:
        """Return where a tick stands, and go on to it; `received_ns` is of a clock never set."""
        if not self._boots.is_new(event):
            return Arrival(TickOrder.REPEATED, has_leapt=False)
        is_alive = self._boot_id != "" and received_ns - self.received_ns < _OVER_AFTER_NS
        if event.boot_id == self._boot_id:
            # By how much the wall clock went otherwise than the clock that is never set.
            step_ns = event.time_ns - self._time_ns - (event.seq - self._seq) * NS_PER_MS
            if abs(step_ns) > LEAP_NS:
                self._offset_ns += step_ns
                # Only a leap ahead may be taken back; a clock that was set back was wrong before.
                self._leapt_seq = event.seq if step_ns > 0 else None
            elif self._leapt_seq is not None and event.seq - self._leapt_seq >= _TRIAL_MS:
                self._leapt_seq = None
        elif is_alive and event.time_ns < self._time_ns:
            # Of an earlier boot, which a spool brings late.
            return Arrival(TickOrder.SUPERSEDED, has_leapt=False)
        else:
            # A boot that follows another: its clock may be wrong, as before NTP has answered, so
            # that it begins on trial. Of the first boot there is nothing to compare it with.
            booted_ns = event.time_ns - event.seq * NS_PER_MS
            self._offset_ns = min(0, booted_ns - self._time_ns) if self._boot_id else 0
            self._leapt_seq = event.seq if self._boot_id else None
            self._boot_id = event.boot_id
        self._seq, self._time_ns, self.received_ns = event.seq, event.time_ns, received_ns
        return Arrival(TickOrder.CURRENT, has_leapt=self._leapt_seq is not None)


class Timelines:
    """The timelines of the nodes of one partition that were heard of within a day or two."""

    def __init__(self) -> None:
        self._nodes: Recent[str, Timeline] = Recent()

    def __len__(self) -> int:
        """Return how many nodes are remembered."""
        return len(self._nodes)

    def restore(
        self, node: str, seqs: Mapping[str, int], *, time_ns: int, received_ns: int
    ) -> None:
        """Go on, of a key's node, as `Timeline` does."""
        self._nodes[node] = Timeline(seqs, time_ns=time_ns, received_ns=received_ns)

    def observe(self, event: TickRecord, *, received_ns: int) -> Arrival:
        """Return where a tick stands in its node's time, and go on to it."""
        self._nodes.go_on(received_ns)
        node = node_key(event)
        if (timeline := self._nodes.get(node)) is None:
            timeline = self._nodes[node] = Timeline()
        return timeline.observe(event, received_ns=received_ns)

    def behind_ns(self, node: str) -> int:
        """Return how far the clock of a key's node was seen to be set back, at least."""
        timeline = self._nodes.get(node)
        return timeline.behind_ns if timeline else 0
