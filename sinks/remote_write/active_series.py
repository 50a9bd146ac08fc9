"""The series that are active, and a tick encoded against them: remote-write 1.0 on the wire.

Protobuf by hand. A series' labels never change and a sample is 16 bytes, so that all of a series up
to its value is constant: a prefix, made once. A request is then prefixes, values and timestamps put
together; the tests check that encoding against protobuf itself.

Here also lives what a partition's sender remembers: of each node that was heard of within a day the
latest time that was sent, and of each of its series the prefix. A series that the next tick does
not have ends with a stale marker at that tick's time. Which tick is the next is decided elsewhere:
after a clock was set back it is stamped earlier than what was sent before. Pure; nothing is sent.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from gpuledger.clock import NS_PER_MS
from gpuledger.keys import split_key
from gpuledger.ledger.series import SeriesGroup, SeriesValues
from gpuledger.recent import Budget, Recent
from sinks.remote_write.node_intervals import IntervalSamples

Labels = Iterable[tuple[str, str]]
_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
pack_value: Final = struct.Struct("<d").pack
STALE_VALUE: Final = bytes.fromhex("020000000000f07f")
"""The NaN 0x7ff0000000000002, which says that a series has ended; as bytes, since arithmetic and
JSON lose it."""
_FIRST_MS: Final = 1 << 35
_LAST_MS: Final = (1 << 42) - 1
_SAMPLE_BYTES: Final = 16


def series_prefix(labels: Labels) -> bytes:
    """Encode a series with one sample up to that sample's value.

    Labels are sorted by name, empty values left out, as the protocol asks. Raises ValueError for a
    name that comes twice.
    """
    # By bytes, as receivers compare them; a label without a value is none to Prometheus.
    present = sorted((name.encode(), value.encode()) for name, value in labels if value)
    if len({name for name, _ in present}) != len(present):
        raise ValueError(f"a label comes twice: {[name.decode() for name, _ in present]}")
    body = b""
    for name, value in present:
        pair = b"".join((b"\x0a", varint(len(name)), name, b"\x12", varint(len(value)), value))
        body += b"".join((b"\x0a", varint(len(pair)), pair))
    # After the labels: sample (field 2) of 16 bytes, in it the value (field 1, 64 bit).
    size = len(body) + 2 + _SAMPLE_BYTES
    return b"".join((b"\x0a", varint(size), body, b"\x12", varint(_SAMPLE_BYTES), b"\x09"))


def timestamp_suffix(time_ms: int) -> bytes:
    """Encode what follows a sample's value: its time in milliseconds since the epoch.

    Raises ValueError before 1971-02-02 and after 2109-05-15, where it is not the 7 bytes on which
    `series_prefix` counts.
    """
    if not _FIRST_MS <= time_ms <= _LAST_MS:
        raise ValueError(f"time_ns: {time_ms} ms since the epoch is not between 1971 and 2109")
    return b"\x10" + varint(time_ms)


def varint(number: int) -> bytes:
    """Encode a non-negative integer as protobuf does."""
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004  # seven bits a byte
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


MAX_SERIES_BYTES: Final = 128 * 2**20
_GROUP_BYTES: Final = 500
"""Bytes of a group in memory beside its labels, which are there twice, and its prefixes."""


def series_budget(max_bytes: int = MAX_SERIES_BYTES) -> Budget:
    """Return the bytes that the series of all partitions may take together."""
    return Budget(max_bytes=max_bytes)


@dataclass(slots=True)
class _SeriesOfGroup:
    """The series of one group: a prefix for each metric, and which of them had a value last."""

    prefixes: tuple[bytes, ...]
    size_bytes: int
    """What it takes of memory."""
    had: int = 0
    """Bit n is set where metric n had a value in the last tick."""

    @classmethod
    def of(cls, node: str, group: SeriesGroup, external_labels: Labels) -> "_SeriesOfGroup":
        family, (cluster, name) = group.family, split_key(node)
        labels = [
            *external_labels,
            ("cluster", cluster),
            ("node", name),
            *zip(family.labels, group.label_values, strict=True),
        ]
        prefixes = tuple(
            series_prefix([("__name__", metric.name), *labels]) for metric in family.metrics
        )
        labels_bytes = sum(map(len, group.label_values))
        return cls(prefixes, _GROUP_BYTES + labels_bytes + sum(map(len, prefixes)))

    def begin(
        self,
        parts: list[bytes],
        which: Iterable[int],
        starts_ms: Sequence[int | None],
        *,
        before_ms: int,
    ) -> None:
        """Append a 0 of each counter that begins: so that what it begins with is an increase."""
        for number in which:
            start_ms = starts_ms[number]
            # A tick may be shorter than a millisecond, and a node's clock stand anywhere.
            if start_ms is not None and _FIRST_MS <= start_ms < before_ms:
                parts += (self.prefixes[number], pack_value(0.0), timestamp_suffix(start_ms))

    def append(self, parts: list[bytes], values: SeriesValues, suffix: bytes) -> None:
        """Append the samples of a tick, and the ends of series that it has no value of."""
        bit, has, had = 1, 0, self.had
        for prefix, value in zip(self.prefixes, values, strict=True):
            if value is not None:
                has |= bit
                parts += (prefix, pack_value(value), suffix)
            elif had & bit:
                # The protocol asks for a stale marker: without it a receiver goes on showing the
                # last value for five minutes.
                parts += (prefix, STALE_VALUE, suffix)
            bit <<= 1
        self.had = has

    def end(self, parts: list[bytes], suffix: bytes) -> None:
        """Append the ends of all series that had a value last."""
        for number, prefix in enumerate(self.prefixes):
            if self.had >> number & 1:
                parts += (prefix, STALE_VALUE, suffix)


@dataclass(slots=True)
class _Node:
    latest_ms: int = -1
    """The latest time that was encoded."""
    seen_ns: int = 0
    """When its last tick came, by the monotonic clock."""
    groups: dict[SeriesGroup, _SeriesOfGroup] = field(default_factory=dict)
    size_bytes: int = 0
    """What its groups take of memory."""

    def go_to(self, time_ms: int) -> bool:
        """Remember a time; return whether it or a later one was encoded before."""
        is_behind = time_ms <= self.latest_ms
        self.latest_ms = max(self.latest_ms, time_ms)
        return is_behind


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTick:
    """One node's tick as a part of a write request; such parts may be put one after another."""

    body: bytes
    samples: int
    is_behind: bool = False
    """Whether its node has sent a tick of this time or a later one: not every receiver takes it."""

    @classmethod
    def of(cls, parts: list[bytes], *, is_behind: bool = False) -> "EncodedTick":
        """Return what the parts of its samples make: prefix, value and timestamp of each."""
        return cls(body=b"".join(parts), samples=len(parts) // 3, is_behind=is_behind)


class ActiveSeries:
    """The series of the nodes of one partition; `budget` is what those of all may take.

    Each series has the `external_labels` too.
    """

    def __init__(
        self, *, budget: Budget | None = None, external_labels: Mapping[str, str] = _NO_LABELS
    ) -> None:
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

    def encode(self, samples: IntervalSamples, *, now_ns: int = 0) -> EncodedTick:
        """Encode the next samples of a node, and the ends of series.

        `now_ns` is the monotonic clock's time, for `end_silent`. Raises ValueError, and changes
        no series, for a time that the wire cannot carry.
        """
        if samples.is_past:
            return self._encode_past(samples, now_ns=now_ns)
        # What may raise comes first: what is put aside has changed nothing.
        time_ms = samples.time_ns // NS_PER_MS
        suffix = timestamp_suffix(time_ms)
        node = self._node(samples.node, now_ns)
        node.seen_ns = now_ns
        parts: list[bytes] = []
        before_bytes = node.size_bytes
        for group, of_group in samples.values.items():
            series = node.groups.get(group)
            if series is None:
                series = _SeriesOfGroup.of(samples.node, group, self._external_labels)
                node.groups[group] = series
                node.size_bytes += series.size_bytes
            if group in samples.begun:
                starts_ms = samples.starts_ms[group]
                series.begin(parts, samples.begun[group], starts_ms, before_ms=time_ms)
            series.append(parts, of_group, suffix)
        # A pod that has ended, a GPU that is lost, a label that has changed.
        for group in node.groups.keys() - samples.values.keys():
            ended = node.groups.pop(group)
            node.size_bytes -= ended.size_bytes
            ended.end(parts, suffix)
        if node.size_bytes != before_bytes:
            # This may forget other nodes, whose series took too much together with these.
            self._nodes.grow(node.size_bytes - before_bytes)
        return EncodedTick.of(parts, is_behind=node.go_to(time_ms))

    def _encode_past(self, samples: IntervalSamples, *, now_ns: int) -> EncodedTick:
        """Encode the samples of a tick that others have followed: it begins and ends no series."""
        time_ms = samples.time_ns // NS_PER_MS
        suffix = timestamp_suffix(time_ms)
        parts: list[bytes] = []
        for group, of_group in samples.values.items():
            # Of nothing that was sent before, so that nothing ends.
            series = _SeriesOfGroup.of(samples.node, group, self._external_labels)
            series.append(parts, of_group, suffix)
        return EncodedTick.of(parts, is_behind=self._node(samples.node, now_ns).go_to(time_ms))

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
                suffix, parts = timestamp_suffix(node.latest_ms), list[bytes]()
                for series in node.groups.values():
                    series.end(parts, suffix)
                node.groups.clear()
                self._nodes.grow(-node.size_bytes)
                node.size_bytes = 0
                yield EncodedTick.of(parts)

    def _node(self, name: str, now_ns: int) -> _Node:
        self._nodes.go_on(now_ns)
        if (node := self._nodes.get(name)) is None:
            node = self._nodes[name] = _Node()
        return node

    def __len__(self) -> int:
        """Count the series that are alive."""
        groups = (series for node in self._nodes.values() for series in node.groups.values())
        return sum(series.had.bit_count() for series in groups)
