"""The series that are active: which a tick begins, goes on with and ends.

Here lives what a partition's sender remembers: of each node that was heard of within a day the
latest time that was sent, and the labels of each of its series, encoded once. A series that the
next tick does not have ends with a stale marker at that tick's time. Which tick is the next is
decided elsewhere: after a clock was set back it is stamped earlier than what was sent before. How
samples look on the wire is `wire`'s. Pure; nothing is sent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from gpuledger.clock import NS_PER_MS
from gpuledger.keys import split_key
from gpuledger.ledger.families import Family
from gpuledger.ledger.series import SeriesGroup, SeriesValues
from gpuledger.recent import Budget, Recent
from sinks.remote_write.namespace_budgets import (
    Namespace,
    NamespaceBudgets,
    OverBudget,
    PartitionNamespaces,
    namespace_of,
)
from sinks.remote_write.node_intervals import IntervalSamples
from sinks.remote_write.wire import (
    NO_START,
    STALE_VALUE,
    Labels,
    LabelSet,
    Metric,
    SampleGroup,
    TimedSamples,
    Version,
    encode_request,
    encode_start,
    encode_time,
    encode_value,
    is_encodable,
)

_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
MAX_SERIES_BYTES: Final = 128 * 2**20
_GROUP_BYTES: Final = 500
"""Bytes of a group in memory beside its labels, which are there twice, and its prefixes."""


def series_budget(max_bytes: int = MAX_SERIES_BYTES) -> Budget:
    """Return the bytes that the series of all partitions may take together."""
    return Budget(max_bytes=max_bytes)


@cache
def metrics_of(family: Family) -> tuple[Metric, ...]:
    """Return a family's metrics as they are sent."""
    return tuple(Metric(name=one.name, kind=one.kind, help=one.help) for one in family.metrics)


_ZERO: Final = encode_value(0.0)


def _starts(starts_ms: Sequence[int | None]) -> list[bytes]:
    return [
        encode_start(start_ms) if start_ms is not None and is_encodable(start_ms) else NO_START
        for start_ms in starts_ms
    ]


@dataclass(slots=True)
class _SeriesOfGroup:
    """The series of one group: their labels, and which of its metrics had a value last."""

    labels: LabelSet
    metrics: tuple[Metric, ...]
    size_bytes: int
    """What it takes of memory."""
    namespace: Namespace | None = None
    """The namespace for which it counts."""
    counted: int = 0
    """As how many series."""
    had: int = 0
    """Bit n is set where metric n had a value in the last tick."""
    starts_ms: Sequence[int | None] | None = None
    """When its counters were 0."""
    starts: list[bytes] | None = None
    """The same, encoded."""

    @classmethod
    def of(cls, node: str, group: SeriesGroup, external_labels: Labels) -> "_SeriesOfGroup":
        family, (cluster, name) = group.family, split_key(node)
        labels = LabelSet(
            [
                *external_labels,
                ("cluster", cluster),
                ("node", name),
                *zip(family.labels, group.label_values, strict=True),
            ]
        )
        return cls(labels, metrics_of(family), _GROUP_BYTES + labels.size_bytes)

    def begin(
        self, which: Iterable[int], starts_ms: Sequence[int | None], *, before_ms: int
    ) -> Iterator[TimedSamples]:
        """Yield a 0 of each counter that begins: so that what it begins with is an increase."""
        for number in which:
            start_ms = starts_ms[number]
            # A tick may be shorter than a millisecond, and a node's clock stand anywhere.
            if start_ms is not None and is_encodable(start_ms) and start_ms < before_ms:
                zeros: list[bytes | None] = [None] * len(self.metrics)
                zeros[number] = _ZERO
                group = SampleGroup(self.labels, self.metrics, zeros, _starts(starts_ms))
                yield TimedSamples(encode_time(start_ms), [group])

    def next(
        self, values: SeriesValues, starts_ms: Sequence[int | None] | None = None
    ) -> SampleGroup:
        """Return the samples of a tick, and the ends of series that it has no value of."""
        bit, has, had = 1, 0, self.had
        encoded: list[bytes | None] = []
        for value in values:
            if value is not None:
                has |= bit
                encoded.append(encode_value(value))
            else:
                # The protocol asks for a stale marker: without it a receiver goes on showing the
                # last value for five minutes.
                encoded.append(STALE_VALUE if had & bit else None)
            bit <<= 1
        self.had = has
        # They change where a counter begins alone, so that they are encoded once.
        if starts_ms is not None and starts_ms != self.starts_ms:
            self.starts_ms, self.starts = starts_ms, _starts(starts_ms)
        return SampleGroup(self.labels, self.metrics, encoded, self.starts)

    def end(self) -> SampleGroup:
        """Return the ends of all series that had a value last."""
        return self.next((None,) * len(self.metrics))


@dataclass(slots=True)
class _Node:
    latest_ms: int = -1
    """The latest time that was encoded."""
    seen_ns: int = 0
    """When its last tick came, by the monotonic clock."""
    groups: dict[SeriesGroup, _SeriesOfGroup] = field(default_factory=dict)
    known_bytes: int = 0
    """What else is kept of it, as it is counted in `size_bytes`."""
    size_bytes: int = 0
    """What its groups take of memory."""

    def go_to(self, time_ms: int) -> bool:
        """Remember a time; return whether it or a later one was encoded before."""
        is_behind = time_ms <= self.latest_ms
        self.latest_ms = max(self.latest_ms, time_ms)
        return is_behind


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTick:
    """The samples of one node's tick, of which requests are put together."""

    timed: tuple[TimedSamples, ...]
    """What begins first: a series' samples are in the order of their times."""
    samples: int
    is_behind: bool = False
    """Whether its node has sent a tick of this time or a later one: not every receiver takes it."""

    @classmethod
    def of(
        cls,
        time: bytes,
        groups: list[SampleGroup],
        *,
        begun: Sequence[TimedSamples] = (),
        is_behind: bool = False,
    ) -> "EncodedTick":
        """Return the samples of groups at one time, behind what has begun before it."""
        samples = sum(len(values) - values.count(None) for _, _, values, _ in groups)
        return cls(
            timed=(*begun, TimedSamples(time, groups)),
            samples=samples + len(begun),
            is_behind=is_behind,
        )

    def encode(self, version: Version) -> bytes:
        """Return the body of a request with these samples alone."""
        return encode_request(version, self.timed)


class ActiveSeries:
    """The series of the nodes of one partition; `budget` is what those of all may take.

    Each series has the `external_labels` too.
    """

    def __init__(
        self,
        *,
        budget: Budget | None = None,
        external_labels: Mapping[str, str] = _NO_LABELS,
        namespaces: NamespaceBudgets | None = None,
    ) -> None:
        self._namespaces = PartitionNamespaces(namespaces or NamespaceBudgets())
        self._nodes_before = (0, 0)
        self._external_labels = tuple(external_labels.items())
        self._nodes: Recent[str, _Node] = Recent(
            budget=budget or series_budget(), size_bytes=attrgetter("size_bytes")
        )

    @property
    def forgotten(self) -> int:
        """How many nodes were forgotten for want of room."""
        return self._nodes.forgotten

    def clear(self) -> None:
        """Forget all series without ending them."""
        self._nodes.clear()
        self._namespaces.recount([])

    def take_left_out(self) -> Mapping[OverBudget, int]:
        """Return how many samples of whom were left out since this was asked last."""
        return self._namespaces.take_left_out()

    def restore(self, samples: IntervalSamples, *, now_ns: int = 0) -> None:
        """Go on from what a former owner has sent of a node: what the next samples lack ends."""
        if samples.values:
            self.encode(samples, now_ns=now_ns)

    def encode(self, samples: IntervalSamples, *, now_ns: int = 0) -> EncodedTick:
        """Encode the next samples of a node, and the ends of series.

        `now_ns` is the monotonic clock's time, for `end_silent`. Raises ValueError, and changes
        no series, for a time that the wire cannot carry.
        """
        if samples.is_past:
            return self._encode_past(samples, now_ns=now_ns)
        # What may raise comes first: what is put aside has changed nothing.
        time_ms = samples.time_ns // NS_PER_MS
        time = encode_time(time_ms)
        node = self._node(samples.node, now_ns)
        node.seen_ns = now_ns
        groups: list[SampleGroup] = []
        begun: list[TimedSamples] = []
        before_bytes = node.size_bytes
        node.size_bytes += samples.known_bytes - node.known_bytes
        node.known_bytes = samples.known_bytes
        for group, of_group in samples.values.items():
            series = node.groups.get(group)
            if series is None:
                series = self._begin(samples.node, group, of_group)
                if series is None:
                    continue
                node.groups[group] = series
                node.size_bytes += series.size_bytes
            starts_ms = samples.starts_ms.get(group)
            if starts_ms is not None and group in samples.begun:
                begun += series.begin(samples.begun[group], starts_ms, before_ms=time_ms)
            groups.append(series.next(of_group, starts_ms))
        # A pod that has ended, a GPU that is lost, a label that has changed.
        for group in node.groups.keys() - samples.values.keys():
            ended = node.groups.pop(group)
            node.size_bytes -= ended.size_bytes
            self._namespaces.end(ended.namespace, ended.counted)
            groups.append(ended.end())
        if node.size_bytes != before_bytes:
            # This may forget other nodes, whose series took too much together with these.
            self._nodes.grow(node.size_bytes - before_bytes)
        self._recount_forgotten()
        return EncodedTick.of(time, groups, begun=begun, is_behind=node.go_to(time_ms))

    def _encode_past(self, samples: IntervalSamples, *, now_ns: int) -> EncodedTick:
        """Encode the samples of a tick that others have followed: it begins and ends no series."""
        time_ms = samples.time_ns // NS_PER_MS
        time = encode_time(time_ms)
        node = self._node(samples.node, now_ns)
        groups: list[SampleGroup] = []
        for group, values in samples.values.items():
            past: _SeriesOfGroup | None
            # What goes on has its part of the budget; what is past needs room, and takes none.
            if group in node.groups:
                past = _SeriesOfGroup.of(samples.node, group, self._external_labels)
            else:
                past = self._begin(samples.node, group, values, is_counted=False)
            if past is not None:
                # Of nothing that was sent before, so that nothing ends.
                groups.append(past.next(values, samples.starts_ms.get(group)))
        return EncodedTick.of(time, groups, is_behind=node.go_to(time_ms))

    def _begin(
        self, node: str, group: SeriesGroup, values: SeriesValues, *, is_counted: bool = True
    ) -> _SeriesOfGroup | None:
        """Return the series of a group that begins; `None` where its namespace has no room."""
        namespace, count = None, 0
        if self._namespaces.are_bounded:
            cluster, _ = split_key(node)
            namespace = namespace_of(cluster, group)
            count = len(values) - values.count(None)
            if self._namespaces.leaves_out(namespace, count):
                return None
            if is_counted:
                self._namespaces.begin(namespace, count)
        made = _SeriesOfGroup.of(node, group, self._external_labels)
        made.namespace, made.counted = namespace, count
        return made

    def _recount_forgotten(self) -> None:
        """Have nodes that were forgotten have nothing of a budget any more."""
        forgotten_before, nodes_before = self._nodes_before
        self._nodes_before = (self.forgotten, len(self._nodes))
        if self.forgotten == forgotten_before and len(self._nodes) >= nodes_before:
            return
        self._namespaces.recount(
            (series.namespace, series.counted)
            for node in self._nodes.values()
            for series in node.groups.values()
        )

    def has_silent(self, before_ns: int) -> bool:
        """Return whether there is something for `end_silent` to end."""
        return any(node.groups and node.seen_ns < before_ns for node in self._nodes.values())

    def end_silent(self, *, before_ns: int) -> Iterator[EncodedTick]:
        """End, node by node, all series of those whose last tick came before `before_ns`."""
        for node in self._nodes.values():
            if node.groups and node.seen_ns < before_ns:
                # Behind the last sample, and as close to it as can be: the node's own time may
                # not have come so far yet, and a time of this machine could be behind it.
                node.latest_ms += 1
                groups = [series.end() for series in node.groups.values()]
                for series in node.groups.values():
                    self._namespaces.end(series.namespace, series.counted)
                node.groups.clear()
                self._nodes.grow(-node.size_bytes)
                node.size_bytes = node.known_bytes = 0
                yield EncodedTick.of(encode_time(node.latest_ms), groups)

    def _node(self, name: str, now_ns: int) -> _Node:
        self._nodes.go_on(now_ns)
        if (node := self._nodes.get(name)) is None:
            node = self._nodes[name] = _Node()
        return node

    def __len__(self) -> int:
        """Count the series that are alive."""
        groups = (series for node in self._nodes.values() for series in node.groups.values())
        return sum(series.had.bit_count() for series in groups)
