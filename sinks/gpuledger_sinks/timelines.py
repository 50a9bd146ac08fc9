"""Decides whether a tick is its node's newest, was seen before, or comes from an earlier boot.

A restarted join may publish a tick twice. Ticks are identified by (cluster, node, boot, seq).
`SeenTicks` is for sinks that keep no other state of a node. While a partition is assigned, it keeps
the seen ticks of nodes that had a tick within a day. The store sink also writes them to the store,
so that they outlive the assignment (`gpuledger_sinks.store.seen`).

`Timelines` is for sinks that keep state of each node. A node's wall clock can be set forwards or
backwards at any moment and may be wrong after a reboot. Therefore only `(boot_id, seq)` decides
whether a tick is new and how much time passed: `seq` is the time since boot in milliseconds, which
cannot be set.

Ticks of two boots may arrive alternately, because a spool may deliver ticks of the earlier boot
late. Wall clocks decide only which of these boots is the earlier one. A wrong decision is corrected
after `_OVER_AFTER_NS`, because two boots of a node never run at the same time.

The time `_OVER_AFTER_NS` is measured by this machine's clock as ticks arrive. An event contains
only its node's time, which is also its Kafka timestamp. By `seq`, a spool that is being sent looks
like a running boot. This decision is therefore the only one that may differ when the same events
are read again.
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
"""A record that identifies a tick of a node and contains the tick's time."""
MAX_SEEN_BOOTS: Final = 5
"""Number of boots that are kept per node: those with the newest ticks, because a spool may deliver
ticks of earlier boots. The join keeps more: also the boots that ran longest."""


_NONE_SEEN: Final[Mapping[str, int]] = MappingProxyType({})


class SeenBoots:
    """The last tick seen of a node's most recent boots; does not use wall clocks."""

    __slots__ = ("_seqs",)

    def __init__(self, seqs: Mapping[str, int] = _NONE_SEEN) -> None:
        """Continue after the last `seq` of each boot; the boot with the newest tick is last."""
        self._seqs = dict(seqs)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield each boot with its last `seq`; the boot with the newest tick is last."""
        return iter(self._seqs.items())

    def __reversed__(self) -> Iterator[str]:
        """Yield the boots, beginning with the boot that had the newest tick."""
        return reversed(self._seqs)

    def is_new(self, event: TickRecord) -> bool:
        """Return whether the tick is newer than all ticks seen of its boot; if so, remember it."""
        boot_id, seq = event.boot_id, event.seq
        # `seq` never falls within a boot, and a node's ticks come in the order of their partition,
        # so a tick that is not after the last one was published before.
        if seq <= self._seqs.get(boot_id, -1):
            return False
        # Moved to the end, so that the boot whose last tick is oldest is first.
        self._seqs.pop(boot_id, None)
        self._seqs[boot_id] = seq
        if len(self._seqs) > MAX_SEEN_BOOTS:
            self._seqs.pop(next(islice(self._seqs, 1)))
        return True


class SeenTicks:
    """The ticks seen of each node; a node's ticks always come in one partition."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._nodes: dict[TopicPartition, Recent[str, SeenBoots]] = {}

    def is_new(self, partition: TopicPartition, event: GpuEvent) -> bool:
        """Return whether the tick is newer than all ticks seen of its boot; if so, remember it."""
        if (nodes := self._nodes.get(partition)) is None:
            nodes = self._nodes[partition] = Recent()
        nodes.go_on(self._clock.monotonic_ns())
        node = node_key(event)
        if (boots := nodes.get(node)) is None:
            boots = nodes[node] = SeenBoots()
        return boots.is_new(event)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget partitions that were revoked, or whose records are read again."""
        for partition in partitions:
            self._nodes.pop(partition, None)

    def state_of(self, partition: TopicPartition) -> dict[str, list[tuple[str, int]]]:
        """Return the last `seq` of each boot, by node, in a form that JSON can store."""
        nodes = self._nodes.get(partition)
        return {} if nodes is None else {node: list(boots) for node, boots in nodes.items()}

    def restore(
        self, partition: TopicPartition, state: Mapping[str, Iterable[tuple[str, int]]]
    ) -> None:
        """Restore which ticks of a partition's nodes were already seen, as if seen just now."""
        nodes = self._nodes[partition] = Recent()
        nodes.go_on(self._clock.monotonic_ns())
        for node, boots in state.items():
            nodes[node] = SeenBoots(dict(boots))


_OVER_AFTER_NS: Final = NS_PER_MINUTE
"""Time without ticks of the running boot after which a boot with earlier timestamps replaces it.
The other boot is then the later one, and its clock is behind."""
LEAP_NS: Final = 10 * NS_PER_SECOND
"""Clock differences below this are ignored."""
_TRIAL_MS: Final = 60_000
"""How long a clock is not trusted after it leapt ahead, in milliseconds of the time since boot."""


class TickOrder(Enum):
    """How a tick relates to the ticks of its node that came before."""

    CURRENT = "current"
    """The newest tick of the running boot."""
    REPEATED = "repeated"
    """A tick that was seen before."""
    SUPERSEDED = "superseded"
    """A tick of a boot that another boot has followed; its values are outdated."""


class Arrival(NamedTuple):
    """How a tick relates to the earlier ticks of its node, and whether its time can be trusted."""

    order: TickOrder
    has_leapt: bool
    """Whether the node's clock leapt ahead within the last minute, and may soon be set back."""


class Timeline:
    """Tracks the time and the boots of one node by its ticks."""

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
        """Continue after the last `seq` of each boot; the running boot is last.

        The last tick of the running boot has the time `time_ns` and counts as received at
        `received_ns`.
        """
        self._boots = SeenBoots(seqs)
        self._boot_id = next(reversed(self._boots), "")
        self._seq = seqs.get(self._boot_id, 0)
        self._time_ns = time_ns
        self.received_ns = received_ns
        """When the last tick of the running boot was received, by the monotonic clock."""
        self._offset_ns = 0
        self._leapt_seq: int | None = None

    @property
    def behind_ns(self) -> int:
        """The minimum time by which the node's clock was set back, in nanoseconds."""
        return max(0, -self._offset_ns)

    def observe(self, event: TickRecord, *, received_ns: int) -> Arrival:
        """Record a tick; return whether it is new, and whether its time can be trusted.

        `received_ns` is the current time of the monotonic clock.
        """
        if not self._boots.is_new(event):
            return Arrival(TickOrder.REPEATED, has_leapt=False)
        is_alive = self._boot_id != "" and received_ns - self.received_ns < _OVER_AFTER_NS
        if event.boot_id == self._boot_id:
            # The change of the wall clock, minus the change of the time since boot.
            step_ns = event.time_ns - self._time_ns - (event.seq - self._seq) * NS_PER_MS
            if abs(step_ns) > LEAP_NS:
                self._offset_ns += step_ns
                # Only a leap ahead may be reverted. A clock that was set back was wrong before.
                self._leapt_seq = event.seq if step_ns > 0 else None
            elif self._leapt_seq is not None and event.seq - self._leapt_seq >= _TRIAL_MS:
                self._leapt_seq = None
        elif is_alive and event.time_ns < self._time_ns:
            # A tick of an earlier boot, which a spool brings late.
            return Arrival(TickOrder.SUPERSEDED, has_leapt=False)
        else:
            # The clock of a boot that follows another is not trusted at first, because it may be
            # wrong until NTP answers. The first boot cannot be compared with another one.
            booted_ns = event.time_ns - event.seq * NS_PER_MS
            self._offset_ns = min(0, booted_ns - self._time_ns) if self._boot_id else 0
            self._leapt_seq = event.seq if self._boot_id else None
            self._boot_id = event.boot_id
        self._seq, self._time_ns, self.received_ns = event.seq, event.time_ns, received_ns
        return Arrival(TickOrder.CURRENT, has_leapt=self._leapt_seq is not None)


class Timelines:
    """The timelines of one partition's nodes that had a tick within a day or two."""

    def __init__(self) -> None:
        self._nodes: Recent[str, Timeline] = Recent()

    def __len__(self) -> int:
        """Return the number of nodes remembered."""
        return len(self._nodes)

    def restore(
        self, node: str, seqs: Mapping[str, int], *, time_ns: int, received_ns: int
    ) -> None:
        """Restore the timeline of a node, given by its key; arguments as for `Timeline`."""
        self._nodes[node] = Timeline(seqs, time_ns=time_ns, received_ns=received_ns)

    def observe(self, event: TickRecord, *, received_ns: int) -> Arrival:
        """Record a tick of a node; return whether it is new, repeated or superseded.

        The result also has whether the tick's time can be trusted. `received_ns` is the current
        time of the monotonic clock.
        """
        self._nodes.go_on(received_ns)
        node = node_key(event)
        if (timeline := self._nodes.get(node)) is None:
            timeline = self._nodes[node] = Timeline()
        return timeline.observe(event, received_ns=received_ns)

    def behind_ns(self, node: str) -> int:
        """Return the minimum time by which a node's clock was set back, in nanoseconds.

        The node is given by its key.
        """
        timeline = self._nodes.get(node)
        return timeline.behind_ns if timeline else 0
