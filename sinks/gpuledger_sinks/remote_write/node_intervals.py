"""Groups the ticks of one node for sending: one set of samples per interval of event time.

An interval lasts `interval_ns` of the node's own time and ends at a multiple of this length since
the epoch. A tick belongs to the interval in which it ends. An interval's samples are made when the
node's next tick belongs to another interval (`add`), or when no more ticks come (`close`). They
have the time of the interval's last tick, so that the same ticks always make the same samples. With
a length of 0, each tick is its own interval.

Counters change only when an interval closes, together with the position up to which ticks are
counted. A node's saved state is therefore always the state at the end of an interval. A sink that
resumes from the state reads the later ticks again, skips the ticks that are already counted
(`timelines`), and rebuilds the open interval from the others. The committed offset is therefore the
offset of the first tick of the open interval (`first_offset`).

A past tick, which belongs to a boot that another boot has followed, does not describe the present:
its use is counted in the open interval, but its other values are ignored. Pure.
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
"""Default interval between samples of incidents."""
_WITH_GAUGES: Final = frozenset({Category.POD.value, Category.JOB.value})
"""The categories whose users (pods and jobs) have gauges in addition to counters."""
_NONE: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class IntervalSamples:
    """The samples sent for a node's interval."""

    node: str
    """The node's key."""
    time_ns: int
    """Time of the interval's last tick."""
    values: Mapping[SeriesGroup, SeriesValues]
    starts_ms: Mapping[SeriesGroup, Sequence[int | None]] = field(default_factory=dict)
    """When each counter was 0, in milliseconds since the epoch."""
    begun: Mapping[SeriesGroup, Collection[int]] = field(default_factory=dict)
    """The counters that begin in the interval, by the metric's position in the family."""
    record: Record
    """The record of its last tick."""
    is_late: bool = False
    """Whether the join marked its last tick as late."""
    is_past: bool = False
    """Whether it is a single past tick, which begins and ends no series."""
    is_repeated: bool = False
    """Whether the next samples include all information of these samples, as lifetime error counts
    do. If such samples are rejected, they need not be sent again."""
    is_of_incidents: bool = False
    """Whether these are samples of incident counters, which have their own intervals."""
    known_bytes: int = 0
    """Memory of the node's data other than the labels of its series."""


class _OpenInterval:
    """The ticks of an interval that is not closed yet."""

    def __init__(self, number: int | None, record: Record) -> None:
        self.number = number
        """The interval's number; `None` while it has only past ticks."""
        self.first_offset = record.offset
        self.last = record
        self.time_ns = 0
        self.is_late = False
        self.values = IntervalValues()
        self.gpus: Sequence[str] = ()
        """The GPUs of its last tick."""
        self.boots: dict[str, int] = {}
        self.first_seqs: dict[str, int] = {}
        """The `seq` of each boot's first tick."""
        self.boot_id: str | None = None
        """The boot of its last tick; `None` if it has only past ticks."""
        self.named: dict[str, CountedLabels] = {}
        self.has_unnamed = False
        """Whether any use has no names yet; later ticks may contain them."""
        self.use: dict[User, _OpenUse] = {}

    def is_over(self, event: GpuEvent, number: int | None, *, interval_ns: int) -> bool:
        """Return whether a tick with interval number `number` closes this interval.

        The tick's `seq` (uptime in milliseconds) can also close it, because a stopped clock would
        otherwise keep it open indefinitely.
        """
        passed_ms = event.seq - self.first_seqs.get(event.boot_id, event.seq)
        return self.number != number or passed_ms * NS_PER_MS >= 2 * interval_ns

    def count(self, event: GpuEvent, used: Iterable[Used]) -> None:
        """Add a tick's contribution to the counters of the interval."""
        self.boots[event.boot_id] = event.seq
        self.first_seqs.setdefault(event.boot_id, event.seq)
        begun_ns = event.time_ns - event.interval_ns
        for user, amounts in used:
            if (before := self.use.get(user)) is None:
                # A copy has no spare capacity, which would be a quarter of its size.
                self.use[user] = _OpenUse(amounts.copy(), begun_ns)
            else:
                add_amounts(before.amounts, amounts)


@dataclass(slots=True)
class _OpenUse:
    amounts: UsedAmounts
    begun_ns: int


class NodeIntervals:
    """The intervals of one node, and its counters up to the end of the last one."""

    def __init__(
        self,
        node: str,
        *,
        values: EventSeries,
        interval_ns: int,
        incidents_ns: int = INCIDENTS_NS,
        counted: NodeCounters | None = None,
    ) -> None:
        """Continue from the saved counters `counted`, if any.

        Raises ValueError if this record is invalid.
        """
        self._incidents = IncidentsOfNode(every_ns=incidents_ns, counted=counted)
        self._node, self._interval_ns = node, interval_ns
        self._values, self._known, self._users = values, NodeGroups(), KnownUsers()
        self._use = UseOfNode() if counted is None else UseOfNode.restore(counted)
        self._boots = {} if counted is None else {b.boot_id: b.seq for b in counted.boots}
        self._time_ns = 0 if counted is None else counted.time_ns
        self._open: _OpenInterval | None = None
        self.has_changed = False
        """Whether anything was counted since `take_record` was last called."""
        self.received_ns = 0
        """When the node's last tick was received, by the monotonic clock."""

    @property
    def first_offset(self) -> int | None:
        """The offset of the first tick of the open interval; `None` if none is open."""
        return None if self._open is None else self._open.first_offset

    @property
    def boots(self) -> Mapping[str, int]:
        """The `seq` of the last counted tick of each boot; the running boot is last."""
        return self._boots

    def count_incident(self, incident: Incident) -> bool:
        """Count an incident; return whether it is new.

        The incident must not be sent before the record that includes it is committed.
        """
        # Before the first tick, incidents are the only source of the node's time.
        self._time_ns = self._time_ns or incident.time_ns
        is_new = self._incidents.add(incident, time_ns=self._time_ns)
        self.has_changed |= is_new
        return is_new

    def add(self, event: GpuEvent, record: Record, *, is_past: bool) -> Iterator[IntervalSamples]:
        """Add a tick; yield the samples of the intervals that the tick ends.

        `is_past` means that the tick belongs to a boot that another boot has followed. Raises
        ValueError, without changing anything, if the event refers to missing entries.
        """
        # The digest is computed once for both calls, because it takes a tenth of their time.
        described = None if is_past else digest_of_described(event)
        used = list(used_in(event, None if is_past else self._users, described=described))
        values = self._values.values_of(
            event,
            None if is_past else self._known,
            described=described,
        )
        number = -(-event.time_ns // self._interval_ns) if self._interval_ns else None
        is_open = self._open is not None and self._open.number is not None
        # Any other number closes the interval, even a lower one after the clock was set back.
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
        """Close the open interval, if any, and yield its samples."""
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
        """Close an interval of one tick and yield its samples."""
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
        # An interval with only past ticks has no time; the node's time does not advance.
        self._time_ns = closed.time_ns or self._time_ns
        # Waiting use is counted first, because a series begins with its earliest use.
        self._use.name(closed.named)
        for user, use in closed.use.items():
            used = Used(user.named(closed.named), use.amounts)
            self._use.add(used, begun_ns=use.begun_ns, time_ns=self._time_ns)
        self._use.go_on(self._time_ns)
        at_work = closed.boot_id or next(reversed(self._boots), None)
        for boot_id, seq in closed.boots.items():
            # Moved to the end, so that the boot whose last tick is oldest is first.
            self._boots.pop(boot_id, None)
            self._boots[boot_id] = seq
        # The running boot stays last even after late ticks, because a resumed sink takes the last
        # one as the running boot.
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
        """Return the known samples that a previous owner sent for the last counted interval.

        These are the node's counters, and the gauges of containers and jobs that had use in this
        interval, if their names identify the series. `record` is the record of the tick with which
        the node resumes.
        """
        values: dict[SeriesGroup, SeriesValues] = {}
        for labels, use in self._use.series.items():
            values[labels.group] = base_units(use.amounts)
            if labels.category in _WITH_GAUGES and use.seen_ns >= self._time_ns:
                values |= gauges_of(labels, use.amounts, has_maxima=bool(self._interval_ns))
        return IntervalSamples(node=self._node, time_ns=self._time_ns, values=values, record=record)

    def shrink(self) -> None:
        """Make the next record smaller.

        Counts waiting use without names; if no use waits, ends the oldest half of the counters.
        """
        if self._use.has_waiting:
            self._use.stop_waiting()
        else:
            self._use.forget(len(self._use.series) // 2 + 1)

    def take_ended_early(self) -> int:
        """Return how many counters ended early since the last call."""
        ended, self._use.ended_early = self._use.ended_early, 0
        return ended

    def take_record(self, group: str) -> NodeCounters:
        """Return the counters for the state topic, and mark them as unchanged."""
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
    """Return the UUIDs of the physical GPUs of a tick, because incidents name physical GPUs."""
    return [books.reading.uuid for books in event.gpus if books.reading.parent_uuid is None]


class HealthOfNode:
    """Makes samples of the health of one node's GPUs at intervals of `every_ns`."""

    def __init__(self, node: str, *, every_ns: int) -> None:
        self._node, self._every_ns = node, every_ns
        self._known = NodeHealth()

    def add(
        self, readings: NodeReadings, record: Record, *, is_past: bool
    ) -> Iterator[IntervalSamples]:
        """Add readings; if samples are due, yield the current values of all GPUs.

        Ignores past readings, of a boot that another boot has followed. Raises ValueError if there
        are more GPUs than a node may have.
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
