"""The active series: which series a tick begins, continues and ends.

A group is all series that share a metric family and a set of labels, such as the series of a pod.
For each node that had a tick within a day, a partition's sender keeps the latest time sent, and the
encoded labels of each group. A series that is missing from the node's next tick ends with a stale
marker at that tick's time. The caller passes the ticks in order; after a clock was set back, the
next tick has an earlier time than samples sent before. `wire` defines the encoding of samples.
Pure; nothing is sent.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain, compress
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from gpuledger.clock import NS_PER_MS
from gpuledger.keys import split_key
from gpuledger.ledger.families import Family
from gpuledger.ledger.series import SeriesGroup, SeriesValues, absent_in
from gpuledger.recent import Budget, Recent
from gpuledger_sinks.remote_write.node_intervals import IntervalSamples
from gpuledger_sinks.remote_write.wire import (
    NO_START,
    STALE_VALUE,
    LabelSet,
    Metric,
    MetricSet,
    SampleGroup,
    TimedSamples,
    Version,
    encode_request,
    encode_start,
    encode_time,
    encode_value,
    is_encodable,
)

_LabelPairs = tuple[tuple[str, str], ...]
_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
MAX_SERIES_BYTES: Final = 128 * 2**20
_GROUP_BYTES: Final = 450
"""Memory of a group of series without its labels, in all structures of its node, in bytes."""
_OF_USERS: Final = frozenset({"pod_uid", "allocated_pod_uid", "job_id", "allocated_job_id"})
"""Labels that identify a pod or a job."""
_LABEL_COPIES: Final = 2
"""Copies of a label's text in memory: the original, and its encoding for 1.0."""


def series_budget(max_bytes: int = MAX_SERIES_BYTES) -> Budget:
    """Return the budget, in bytes, for the series of all partitions together."""
    return Budget(max_bytes=max_bytes)


@cache
def metrics_of(family: Family) -> tuple[Metric, ...]:
    """Return a family's metrics in the form in which they are sent."""
    return tuple(Metric(name=one.name, kind=one.kind, help=one.help) for one in family.metrics)


@lru_cache(maxsize=4096)
def _metric_set(family: Family, bits: int) -> MetricSet:
    """Return a family's metrics that `bits` selects; the lowest bit is for the first metric."""
    metrics = enumerate(metrics_of(family))
    return MetricSet((metric for number, metric in metrics if bits >> number & 1), bits=bits)


_ZERO: Final = encode_value(0.0)


# Most counters of a node begin together, so their encoded starts are shared.
@lru_cache(maxsize=4096)
def _starts(starts_ms: tuple[int | None, ...]) -> tuple[bytes, ...]:
    return tuple(
        [
            encode_start(start_ms) if start_ms is not None and is_encodable(start_ms) else NO_START
            for start_ms in starts_ms
        ]
    )


@lru_cache(maxsize=4096)
def _chosen(starts: tuple[bytes, ...], bits: int) -> tuple[bytes, ...]:
    """Return the starts that `bits` selects; the lowest bit is for the first start."""
    return tuple([start for number, start in enumerate(starts) if bits >> number & 1])


class _Samples:
    """Collects samples that have the same time."""

    __slots__ = ("groups", "has_parted", "has_stale", "values")

    def __init__(self) -> None:
        self.groups: list[SampleGroup] = []
        self.values: list[bytes] = []
        self.has_stale = False
        self.has_parted = False
        """Whether a group was split, because only some of its metrics have a start."""

    def go_on(
        self,
        last: SampleGroup,
        family: Family,
        values: SeriesValues,
        starts_ms: Sequence[int | None] = (),
    ) -> SampleGroup:
        """Add a group's samples of a tick, and stale markers for values that are now missing.

        `last` contains the metrics that had a value in the previous tick. Returns a group with the
        metrics that have a value in this tick.
        """
        bit, has, had = 1, 0, last.metrics.bits
        encoded: list[bytes | None] = []
        for value in values:
            if value is not None:
                has |= bit
                encoded.append(encode_value(value))
            else:
                # The protocol requires a stale marker: without one a receiver shows the last value
                # for five more minutes.
                encoded.append(STALE_VALUE if had & bit else None)
            bit <<= 1
        self.has_stale = self.has_stale or bool(had & ~has)
        added = self.add(last.labels, family, encoded, _starts(tuple(starts_ms)))
        if added is not None and added.metrics.bits == has:
            # Most ticks have the same metrics as the last one, so the same object can be kept.
            return added
        return SampleGroup(last.labels, _metric_set(family, has))

    def end(self, group: SeriesGroup, last: SampleGroup) -> None:
        """Add stale markers for all series of a group that had a value in the last tick."""
        self.go_on(last, group.family, (None,) * len(group.family.metrics))

    def add(
        self,
        labels: LabelSet,
        family: Family,
        values: Sequence[bytes | None],
        starts: tuple[bytes, ...] = (),
    ) -> SampleGroup | None:
        """Add values of a group, in the order of its family's metrics; `None` adds no sample.

        If only some of the metrics have a start, the group is split in two. Returns the part that
        was added last, or `None` without values.
        """
        with_start = sum(1 << number for number, start in enumerate(starts) if start)
        present = sum(1 << number for number, value in enumerate(values) if value is not None)
        # Most groups have starts for all of their metrics or for none, and are not split.
        self.has_parted = self.has_parted or bool(present & ~with_start and present & with_start)
        added: SampleGroup | None = None
        for bits, has_start in ((present & ~with_start, False), (present & with_start, True)):
            if not bits:
                continue
            chosen = [bits >> number & 1 for number in range(len(values))]
            added = SampleGroup(
                labels, _metric_set(family, bits), _chosen(starts, bits) if has_start else None
            )
            self.groups.append(added)
            self.values += filter(None, compress(values, chosen))
        return added

    def at(self, time: bytes) -> TimedSamples:
        """Return the collected samples with their time."""
        return TimedSamples(time, self.groups, self.values)


def _count(values: SeriesValues) -> int:
    """Return how many of a group's values are present."""
    return len(values) - values.count(None)


def _begun(
    last: SampleGroup,
    family: Family,
    which: Iterable[int],
    starts_ms: Sequence[int | None],
    *,
    before_ms: int,
) -> Iterator[TimedSamples]:
    """Yield a sample of 0 for each counter that begins, so that its first value is an increase.

    The sample has the time at which the counter starts. It is left out if this time is not before
    the tick. `which` contains the counters' positions in the family; `before_ms` is the time of the
    tick.
    """
    for number in which:
        start_ms = starts_ms[number]
        # A tick may be shorter than a millisecond, and a node's clock may show any time.
        if start_ms is not None and is_encodable(start_ms) and start_ms < before_ms:
            zeros: list[bytes | None] = [None] * len(starts_ms)
            zeros[number] = _ZERO
            samples = _Samples()
            samples.add(last.labels, family, zeros, _starts(tuple(starts_ms)))
            yield samples.at(encode_time(start_ms))


def _size_bytes(of_group: SampleGroup) -> int:
    """Return the memory of a group's series, in bytes."""
    return _GROUP_BYTES + _LABEL_COPIES * of_group.labels.size_bytes


def _no_samples(node: str, group: SeriesGroup, external_labels: _LabelPairs) -> SampleGroup:
    """Return a group with the labels of its series and without metrics."""
    family, (cluster, name) = group.family, split_key(node)
    of_node = (*external_labels, ("cluster", cluster), ("node", name))
    labels = _labels_of(of_node, family.labels, group.label_values)
    return SampleGroup(labels, _metric_set(family, 0))


# Groups for means and maxima begin together and have the same labels.
@lru_cache(maxsize=64)
def _labels_of(of_node: _LabelPairs, names: tuple[str, ...], values: tuple[str, ...]) -> LabelSet:
    return LabelSet([*of_node, *zip(names, values, strict=True)])


class _Frame:
    """Which metrics had a value in a node's last tick, and when the node's counters started.

    In most ticks, this is the same as in the tick before. Such a tick begins and ends no series, so
    only its values must be encoded. Its groups are the node's groups, in the same order.
    """

    __slots__ = ("_absent", "_starts", "is_whole")

    def __init__(
        self, samples: "IntervalSamples", values: Sequence[float | None], *, is_whole: bool
    ) -> None:
        """Remember a tick whose samples are all sent.

        `values` has the values of all groups of the tick, one after the other. `is_whole` is
        whether each group has at least one value.
        """
        self._absent, self._starts = absent_in(values), _flat(samples.starts_ms)
        self.is_whole = is_whole
        """Whether each group of series had at least one value."""

    def fits(self, samples: "IntervalSamples", values: Sequence[float | None]) -> bool:
        """Return whether the metrics with a value, and the starts, are those of the last tick."""
        return (
            absent_in(values) == self._absent
            # Usually the lists contain the same objects, which makes the comparison fast.
            and _flat(samples.starts_ms) == self._starts
        )


def _flat(starts_ms: Mapping[SeriesGroup, Sequence[int | None]]) -> list[object]:
    # A list needs half the memory of a mapping.
    return [*starts_ms, *starts_ms.values()]


@dataclass(slots=True)
class _Node:
    latest_ms: int = -1
    """The latest time that was encoded, in milliseconds since the epoch; -1 before the first."""
    seen_ns: int = 0
    """When its last tick came, by the monotonic clock."""
    groups: dict[SeriesGroup, SampleGroup] = field(default_factory=dict)
    """The active groups, each with its labels and the metrics that had a value in the last tick."""
    known_bytes: int = 0
    """Memory of other structures of the node, which is included in `size_bytes`."""
    size_bytes: int = 0
    """Memory of the node's groups and other structures."""
    frame: _Frame | None = None
    """Which metrics had a value in its last tick; `None` if the next tick must be encoded
    completely."""

    def fits(self, samples: IntervalSamples, values: Sequence[float | None]) -> bool:
        """Return whether a tick begins and ends no series, so that only its values must be encoded.

        `values` are the values of all groups of the tick.
        """
        return (
            self.frame is not None
            and [*samples.values] == [*self.groups]
            and self.frame.fits(samples, values)
        )

    def sent(self) -> list[SampleGroup]:
        """Return the groups to send for a tick for which `fits` is true."""
        if self.frame is not None and self.frame.is_whole:
            return [*self.groups.values()]
        return [last for last in self.groups.values() if last.metrics.bits]

    def go_to(self, time_ms: int) -> bool:
        """Record the time of a tick; return whether this or a later time was encoded before."""
        is_behind = time_ms <= self.latest_ms
        self.latest_ms = max(self.latest_ms, time_ms)
        return is_behind


def _user_of(group: SeriesGroup) -> str:
    """Return the pod's UID or the job's id of a group; empty if it has neither."""
    labels = zip(group.family.labels, group.label_values, strict=True)
    return next((value for label, value in labels if value and label in _OF_USERS), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTick:
    """The encoded samples of one node's tick, from which requests are made."""

    timed: tuple[TimedSamples, ...]
    """The samples by time; the zeros of new counters come first, so that each series is in
    order."""
    samples: int
    is_behind: bool = False
    """Whether the node has already sent this or a later time; not every receiver accepts this."""

    @classmethod
    def of(
        cls,
        samples: TimedSamples,
        *,
        begun: Sequence[TimedSamples] = (),
        is_behind: bool = False,
    ) -> "EncodedTick":
        """Return the encoded samples of one time, preceded by `begun`.

        `begun` contains a sample of 0 for each counter that started earlier.
        """
        return cls(
            timed=(*begun, samples),
            samples=len(samples.values) + len(begun),
            is_behind=is_behind,
        )

    def encode(self, version: Version) -> bytes:
        """Return the body of a request with only these samples."""
        return encode_request(version, self.timed)


class ActiveSeries:
    """The series of one partition's nodes.

    `budget` limits the memory for the series of all partitions. Each series also has the
    `external_labels`. `max_series` limits the number of series of pods and jobs per node; pods and
    jobs above the limit get no series. 0 means no limit.
    """

    def __init__(
        self,
        *,
        budget: Budget | None = None,
        external_labels: Mapping[str, str] = _NO_LABELS,
        max_series: int = 0,
    ) -> None:
        self._max_series = max_series
        self._left_out: Counter[str] = Counter()
        self._external_labels = tuple(external_labels.items())
        self._nodes: Recent[str, _Node] = Recent(
            budget=budget or series_budget(), size_bytes=attrgetter("size_bytes")
        )

    @property
    def forgotten(self) -> int:
        """The number of nodes that were forgotten because the memory limit was exceeded."""
        return self._nodes.forgotten

    def clear(self) -> None:
        """Forget all series without sending stale markers."""
        self._nodes.clear()

    def take_left_out(self) -> Mapping[str, int]:
        """Return how many samples per node exceeded `max_series` since the last call."""
        taken, self._left_out = self._left_out, Counter()
        return taken

    def restore(self, samples: IntervalSamples, *, now_ns: int = 0) -> None:
        """Continue the series that a previous owner sent, so that later ticks can end them."""
        # The result is dropped, because the previous owner has sent these samples.
        if samples.values:
            self.encode(samples, now_ns=now_ns)

    def encode(self, samples: IntervalSamples, *, now_ns: int = 0) -> EncodedTick:
        """Return the encoded samples of a node's next tick, with stale markers for ended series.

        `now_ns` is the monotonic time, for `end_silent`. Raises ValueError, without changing any
        series, if the protocol cannot represent the time of the samples.
        """
        if samples.is_past:
            return self._encode_past(samples, now_ns=now_ns)
        # Calls that may raise come first, so that rejected samples change nothing.
        time_ms = samples.time_ns // NS_PER_MS
        time = encode_time(time_ms)
        node = self._node(samples.node, now_ns)
        node.seen_ns = now_ns
        before_bytes = node.size_bytes
        node.size_bytes += samples.known_bytes - node.known_bytes
        node.known_bytes = samples.known_bytes
        begun: list[TimedSamples] = []
        values = list(chain.from_iterable(samples.values.values()))
        if node.fits(samples, values):
            encoded = [encode_value(value) for value in values if value is not None]
            timed = TimedSamples(time, node.sent(), encoded)
        else:
            sent = self._go_on(node, samples, begun)
            timed = sent.at(time)
            # If a group was left out or a series has ended, the next tick differs from this one.
            is_all = len(node.groups) == len(samples.values) and not sent.has_stale
            node.frame = None
            if is_all and not sent.has_parted:
                # The groups are stored in the order of this tick and with its group objects,
                # because the next tick has the same objects.
                node.groups = {group: node.groups[group] for group in samples.values}
                is_whole = len(sent.groups) == len(node.groups)
                node.frame = _Frame(samples, values, is_whole=is_whole)
        if node.size_bytes != before_bytes:
            # May forget other nodes if all series together need too much memory.
            self._nodes.grow(samples.node, node.size_bytes - before_bytes)
        return EncodedTick.of(timed, begun=begun, is_behind=node.go_to(time_ms))

    def _go_on(self, node: _Node, samples: IntervalSamples, begun: list[TimedSamples]) -> _Samples:
        """Return the samples of a tick for its node, including ends of series.

        For each counter that begins, a sample of 0 is added to `begun`.
        """
        # Ends first, because they make room for new series.
        ended = self._take_ended(node, samples)
        left_out = self._leave_out(node, samples)
        sent = _Samples()
        for group, values in samples.values.items():
            if group in left_out:
                continue
            last = node.groups.get(group)
            if last is None:
                last = _no_samples(samples.node, group, self._external_labels)
                node.size_bytes += _size_bytes(last)
            starts_ms = samples.starts_ms.get(group, ())
            if group in samples.begun:
                before_ms = samples.time_ns // NS_PER_MS
                which = samples.begun[group]
                begun += _begun(last, group.family, which, starts_ms, before_ms=before_ms)
            node.groups[group] = sent.go_on(last, group.family, values, starts_ms)
        for group, last in ended.items():
            sent.end(group, last)
        return sent

    def _encode_past(self, samples: IntervalSamples, *, now_ns: int) -> EncodedTick:
        """Encode a tick that is not the node's newest; it begins and ends no series."""
        time_ms = samples.time_ns // NS_PER_MS
        time = encode_time(time_ms)
        node = self._node(samples.node, now_ns)
        # A past tick begins no series here, but its series may be new for the receiver, so the
        # limit applies to them too.
        left_out = self._leave_out(node, samples)
        sent = _Samples()
        for group, values in samples.values.items():
            if group in left_out:
                continue
            # `past` has no metrics of the last tick, so that no series ends.
            past = _no_samples(samples.node, group, self._external_labels)
            sent.go_on(past, group.family, values, samples.starts_ms.get(group, ()))
        return EncodedTick.of(sent.at(time), is_behind=node.go_to(time_ms))

    def _take_ended(
        self, node: _Node, samples: IntervalSamples
    ) -> Mapping[SeriesGroup, SampleGroup]:
        """Remove and return the groups that a tick ends, for example those of a pod that ended."""
        ended = [group for group in node.groups if group not in samples.values]
        found = {group: node.groups.pop(group) for group in ended}
        for last in found.values():
            node.size_bytes -= _size_bytes(last)
        return found

    def _leave_out(self, node: _Node, samples: IntervalSamples) -> Collection[SeriesGroup]:
        """Return the new groups that exceed `max_series`, and count their samples.

        All new groups of a pod or job are sent, or none. A pod or job that has series may get more.
        Groups of devices and nodes are always sent.
        """
        if not self._max_series:
            return ()
        begun: defaultdict[str, list[SeriesGroup]] = defaultdict(list)
        for group in samples.values:
            if group not in node.groups and (user := _user_of(group)):
                begun[user].append(group)
        if not begun:
            return ()
        left_out: set[SeriesGroup] = set()
        alive = Counter[str]()
        for group, last in node.groups.items():
            if user := _user_of(group):
                alive[user] += last.metrics.bits.bit_count()
        room = self._max_series - alive.total()
        for user, groups in begun.items():
            series = sum(_count(samples.values[group]) for group in groups)
            if user in alive or series <= room:
                room -= series
            else:
                left_out.update(groups)
                self._left_out[samples.node] += series
        return left_out

    def observe(self, node: str, *, now_ns: int) -> None:
        """Record when a tick of a node was received, even if nothing is sent."""
        if (known := self._nodes.get(node)) is not None:
            known.seen_ns = now_ns

    def has_silent(self, before_ns: int) -> bool:
        """Return whether `end_silent` would end any series."""
        return any(node.groups and node.seen_ns < before_ns for node in self._nodes.values())

    def end_silent(self, *, before_ns: int) -> Iterator[EncodedTick]:
        """End all series of each node whose last tick was received before `before_ns`.

        Yields the stale markers of each node. `before_ns` is a monotonic time.
        """
        for name, node in self._nodes.items():
            if node.groups and node.seen_ns < before_ns:
                # One millisecond after the last sample: the node's time may have stopped, and this
                # machine's time may be earlier.
                node.latest_ms += 1
                sent = _Samples()
                for group, last in node.groups.items():
                    sent.end(group, last)
                node.groups.clear()
                node.frame = None
                self._nodes.grow(name, -node.size_bytes)
                node.size_bytes = node.known_bytes = 0
                yield EncodedTick.of(sent.at(encode_time(node.latest_ms)))

    def _node(self, name: str, now_ns: int) -> _Node:
        self._nodes.go_on(now_ns)
        if (node := self._nodes.get(name)) is None:
            node = self._nodes[name] = _Node()
        return node

    def __len__(self) -> int:
        """Return the number of active series."""
        last = (of_group for node in self._nodes.values() for of_group in node.groups.values())
        return sum(of_group.metrics.bits.bit_count() for of_group in last)
