"""The ticks of one node as they are sent: one set of samples for each interval of event time.

An interval is `interval_ns` of the node's own time, at multiples of it since the epoch; a tick is
of the interval in which it ends. The samples of an interval are made when the node's next tick is
of another one (`add`), or when nothing more comes (`close`). They bear the time of its last tick,
so that the same ticks make the same samples, however they were polled. Without a length each tick
is an interval by itself.

What is counted changes with the closing alone, and with it the position up to which ticks are
counted. So the state of a node is always that of an interval's end: a sink that goes on from there
reads the ticks behind it once more, passes over those that are counted (`timelines`), and makes
what is left of the open interval anew. That is why the offset that is committed lies before the
first tick of the open interval (`first_offset`).

A tick that comes late, of a boot that another has followed, says nothing of the present: its use is
counted in the interval that is open, and nothing else of it is sent. Pure.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import msgspec

from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.ledger.entries import digest_of_described
from gpuledger.ledger.health import NodeHealth, health_values
from gpuledger.ledger.interval_values import IntervalValues
from gpuledger.ledger.series import (
    EventSeries,
    NodeGroups,
    SeriesGroup,
    SeriesValues,
)
from gpuledger.ledger.usage import (
    CountedLabels,
    KnownUsers,
    Used,
    UsedAmounts,
    User,
    add_amounts,
    base_units,
    gauges_of,
    names_in,
    used_in,
)
from gpuledger.records import Category, GpuEvent, Incident, NodeCounters, NodeReadings
from gpuledger_sinks.remote_write.node_counters import UseOfNode
from gpuledger_sinks.remote_write.node_incidents import IncidentsOfNode
from gpuledger_sinks.timelines import MAX_SEEN_BOOTS

INCIDENTS_NS: Final = 10 * NS_PER_SECOND
"""How often incidents are sent where nothing else is said."""
_WITH_GAUGES: Final = frozenset({Category.POD.value, Category.JOB.value})
"""The accounts of which each series has gauges of its own, which end with it."""
_NONE: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class IntervalSamples:
    """What is sent of a node for one interval."""

    node: str
    """The node's key."""
    time_ns: int
    """Time of its last tick."""
    values: Mapping[SeriesGroup, SeriesValues]
    starts_ms: Mapping[SeriesGroup, Sequence[int | None]] = field(default_factory=dict)
    """When the counters were 0, in milliseconds since the epoch."""
    begun: Mapping[SeriesGroup, Collection[int]] = field(default_factory=dict)
    """Which of them begin in it, by the metric's position in the family."""
    record: Record
    """The record of its last tick."""
    is_late: bool = False
    """Whether the join says that its last tick came behind others."""
    is_past: bool = False
    """Whether it is a tick of the past by itself: it begins and ends no series."""
    is_repeated: bool = False
    """Whether the next samples say all that these do, as of errors that are counted in a GPU's
    life: where they are refused nothing is to be sent once more."""
    is_of_incidents: bool = False
    """Whether it is what is counted of incidents, whose samples have intervals of their own."""
    known_bytes: int = 0
    """What is kept of the node beside the labels of its series, in memory."""


class _OpenInterval:
    """The ticks of an interval that is not closed yet."""

    def __init__(self, number: int | None, record: Record) -> None:
        self.number = number
        """Which interval it is; `None` while nothing but late ticks has come."""
        self.first_offset = record.offset
        self.last = record
        self.time_ns = 0
        self.is_late = False
        self.values = IntervalValues()
        self.gpus: Sequence[str] = ()
        """The GPUs of its last tick."""
        self.boots: dict[str, int] = {}
        self.first_seqs: dict[str, int] = {}
        """Of each boot the number of its first tick."""
        self.boot_id: str | None = None
        """The boot of its last tick; absent where it has late ones alone."""
        self.named: dict[str, CountedLabels] = {}
        self.has_unnamed = False
        """Whether any use of it has no names so far: what comes later in it may have them."""
        self.use: dict[User, _OpenUse] = {}

    def is_over(self, event: GpuEvent, number: int | None, *, interval_ns: int) -> bool:
        """Return whether a tick of interval `number` is of another one.

        By `seq`, too, which is never set: a clock that stands still would keep it open for ever.
        """
        passed_ms = event.seq - self.first_seqs.get(event.boot_id, event.seq)
        return self.number != number or passed_ms * NS_PER_MS >= 2 * interval_ns

    def count(self, event: GpuEvent, used: Iterable[Used]) -> None:
        """Add what a tick adds to the counters."""
        self.boots[event.boot_id] = event.seq
        self.first_seqs.setdefault(event.boot_id, event.seq)
        begun_ns = event.time_ns - event.interval_ns
        for user, amounts in used:
            if (before := self.use.get(user)) is None:
                # A copy has no room for more, which is a quarter of it.
                self.use[user] = _OpenUse(amounts.copy(), begun_ns)
            else:
                add_amounts(before.amounts, amounts)


@dataclass(slots=True)
class _OpenUse:
    amounts: UsedAmounts
    begun_ns: int


class NodeIntervals:
    """The intervals of one node, and what was counted up to the end of the last one."""

    def __init__(
        self,
        node: str,
        *,
        values: EventSeries,
        interval_ns: int,
        incidents_ns: int = INCIDENTS_NS,
        counted: NodeCounters | None = None,
    ) -> None:
        """Go on from what was counted; raises ValueError where that record is broken."""
        self._incidents = IncidentsOfNode(every_ns=incidents_ns, counted=counted)
        self._node, self._interval_ns = node, interval_ns
        self._values, self._known, self._users = values, NodeGroups(), KnownUsers()
        self._use = UseOfNode() if counted is None else UseOfNode.restore(counted)
        self._boots = {} if counted is None else {b.boot_id: b.seq for b in counted.boots}
        self._time_ns = 0 if counted is None else counted.time_ns
        self._open: _OpenInterval | None = None
        self.has_changed = False
        """Whether anything was counted since the record was taken."""
        self.received_ns = 0
        """When its last tick came, by the monotonic clock."""

    @property
    def first_offset(self) -> int | None:
        """The offset of the first tick of the open interval; `None` where none is open."""
        return None if self._open is None else self._open.first_offset

    @property
    def boots(self) -> Mapping[str, int]:
        """The number of the last tick that was counted of each boot, the one at work at the end."""
        return self._boots

    def count_incident(self, incident: Incident) -> bool:
        """Count an incident; return whether it was not counted before.

        It may be sent once the record is committed that has it.
        """
        # Before the first tick the incidents are all that is known of the node's time.
        self._time_ns = self._time_ns or incident.time_ns
        is_new = self._incidents.add(incident, time_ns=self._time_ns)
        self.has_changed |= is_new
        return is_new

    def add(self, event: GpuEvent, record: Record, *, is_past: bool) -> Iterator[IntervalSamples]:
        """Add a tick; yield the samples of intervals that end by it.

        Raises ValueError, with nothing changed, where the event points to what it does not list.
        """
        # Once for both, as it takes as long as a tenth of what follows.
        described = None if is_past else digest_of_described(event)
        used = list(used_in(event, None if is_past else self._users, described=described))
        values = self._values.values_of(
            event,
            None if is_past else self._known,
            described=described,
        )
        number = -(-event.time_ns // self._interval_ns) if self._interval_ns else None
        is_open = self._open is not None and self._open.number is not None
        # Another one, not a later one: where the node's clock was set back nothing waits for it.
        if (
            not is_past
            and is_open
            and self._open
            and self._open.is_over(event, number, interval_ns=self._interval_ns)
        ):
            yield from self.close()
        if self._open is None:
            self._open = _OpenInterval(None, record)
        self._open.count(event, used)
        self._open.has_unnamed |= any(user.unnamed for user, _ in used)
        if self._use.has_waiting or self._open.has_unnamed:
            self._open.named |= names_in(event)
        if not is_past:
            self._open.number = number
            self._open.last, self._open.time_ns = record, event.time_ns
            self._open.boot_id = event.boot_id
            self._open.is_late = bool(event.late)
            self._open.gpus = _gpus_of(event)
            if self._interval_ns:
                self._open.values.add(values, interval_ns=event.interval_ns)
        if not self._interval_ns:
            yield from self._close_tick(event, record, values, is_past=is_past)

    def close(self) -> Iterator[IntervalSamples]:
        """Close the open interval and yield its samples, where there is one."""
        if self._open is None:
            return
        closed, self._open = self._open, None
        self._count(closed)
        if closed.number is not None:
            values = closed.values.values()
            yield self._samples(closed, values)
            yield from self._incident_samples(closed)

    def _close_tick(
        self,
        event: GpuEvent,
        record: Record,
        values: dict[SeriesGroup, SeriesValues],
        *,
        is_past: bool,
    ) -> Iterator[IntervalSamples]:
        """Close the interval that is one tick."""
        if self._open is None:
            return
        closed, self._open = self._open, None
        self._count(closed)
        if is_past:
            yield IntervalSamples(
                node=self._node,
                time_ns=event.time_ns,
                values=values,
                record=record,
                is_late=bool(event.late),
                is_past=True,
            )
        else:
            yield self._samples(closed, values)
            yield from self._incident_samples(closed)

    def _incident_samples(self, closed: _OpenInterval) -> Iterator[IntervalSamples]:
        samples = self._incidents.samples(
            closed.gpus, time_ns=closed.time_ns, interval_ns=self._interval_ns
        )
        if samples is None:
            return
        for group in samples.begun:
            (start_ms,) = samples.starts_ms[group]
            yield IntervalSamples(
                node=self._node,
                time_ns=(start_ms or 0) * NS_PER_MS,
                values={group: (0.0,)},
                starts_ms={group: (start_ms,)},
                record=closed.last,
                is_past=True,
                is_of_incidents=True,
                is_repeated=True,
            )
        yield IntervalSamples(
            node=self._node,
            time_ns=closed.time_ns,
            values=samples.values,
            starts_ms=samples.starts_ms,
            record=closed.last,
            is_late=closed.is_late,
            is_of_incidents=True,
            is_repeated=True,
            known_bytes=self._incidents.size_bytes,
        )

    def _count(self, closed: _OpenInterval) -> None:
        # Of late ticks alone there is no time but the one that was reached before.
        self._time_ns = closed.time_ns or self._time_ns
        # What waited first: a series begins where its first use does.
        self._use.name(closed.named)
        for user, use in closed.use.items():
            used = Used(user.named(closed.named), use.amounts)
            self._use.add(used, begun_ns=use.begun_ns, time_ns=self._time_ns)
        self._use.go_on(self._time_ns)
        at_work = closed.boot_id or next(reversed(self._boots), None)
        for boot_id, seq in closed.boots.items():
            # Put last, so that the boot that was heard of longest ago is first.
            self._boots.pop(boot_id, None)
            self._boots[boot_id] = seq
        # Whatever came late of others: who goes on from the record begins with this one.
        if at_work is not None:
            self._boots[at_work] = self._boots.pop(at_work)
        while len(self._boots) > MAX_SEEN_BOOTS:
            self._boots.pop(next(iter(self._boots)))
        self.has_changed = True

    def _samples(
        self, closed: _OpenInterval, values: dict[SeriesGroup, SeriesValues]
    ) -> IntervalSamples:
        starts_ms: dict[SeriesGroup, Sequence[int | None]] = {}
        for use in self._use.series.values():
            values[use.group] = base_units(use.amounts)
            starts_ms[use.group] = use.starts_ms
        return IntervalSamples(
            node=self._node,
            time_ns=closed.time_ns,
            values=values,
            starts_ms=starts_ms,
            begun={labels.group: which for labels, which in self._use.take_begun().items()},
            record=closed.last,
            is_late=closed.is_late,
        )

    def sent_before(self, record: Record) -> IntervalSamples:
        """Return what is known of the samples of the last interval that was counted.

        Of a node that goes on from a record: its counters, and the gauges of containers and jobs
        that had anything in that interval, as far as their names say which series these are.
        `record` is of the tick with which it goes on.
        """
        values: dict[SeriesGroup, SeriesValues] = {}
        for labels, use in self._use.series.items():
            values[labels.group] = base_units(use.amounts)
            if labels.category in _WITH_GAUGES and use.seen_ns >= self._time_ns:
                values |= gauges_of(labels, use.amounts, has_maxima=bool(self._interval_ns))
        return IntervalSamples(node=self._node, time_ns=self._time_ns, values=values, record=record)

    def shrink(self) -> None:
        """Count what waits for names without them, or else end the oldest half of the counters."""
        if self._use.has_waiting:
            self._use.stop_waiting()
        else:
            self._use.forget(len(self._use.series) // 2 + 1)

    def take_ended_early(self) -> int:
        """Return how many counters ended before their time since this was asked last."""
        ended, self._use.ended_early = self._use.ended_early, 0
        return ended

    def take_record(self, group: str) -> NodeCounters:
        """Return what was counted, as it goes to the state topic; it has not changed then."""
        self.has_changed = False
        record = self._use.record_of(
            group=group, node=self._node, time_ns=self._time_ns, boots=self._boots
        )
        return msgspec.structs.replace(
            record,
            incidents=self._incidents.records() or None,
            known_incidents=self._incidents.hashes() or None,
        )


def _gpus_of(event: GpuEvent) -> Sequence[str]:
    """Return the GPUs of a tick: incidents are of the board, and say of which instance."""
    return [books.reading.uuid for books in event.gpus if books.reading.parent_uuid is None]


class HealthOfNode:
    """The samples of the health of one node's GPUs, which are told every so often."""

    def __init__(self, node: str, *, every_ns: int) -> None:
        self._node, self._every_ns = node, every_ns
        self._known = NodeHealth()

    def add(
        self, readings: NodeReadings, record: Record, *, is_past: bool
    ) -> Iterator[IntervalSamples]:
        """Add readings; yield what is known of all GPUs, where it is time to tell it.

        The health of a boot that another has followed is told no more. Raises ValueError where
        readings are of more GPUs than a node has.
        """
        if is_past:
            return
        values = health_values(readings, self._known, every_ns=self._every_ns)
        if values is not None:
            yield IntervalSamples(
                node=self._node,
                time_ns=readings.time_ns,
                values=values,
                record=record,
                is_repeated=True,
                known_bytes=self._known.size_bytes,
            )
