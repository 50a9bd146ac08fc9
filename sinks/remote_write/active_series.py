"""The series that are alive, and a tick encoded against them.

Here lives what a partition's sender remembers: of each node that was heard of within a day the
latest time that was sent, and of each of its series the encoded labels. A series that the next tick
does not have ends with a stale marker at that tick's time. Which tick is the next is decided
elsewhere: after a clock was set back it is stamped earlier than what was sent before. Pure; nothing
is sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from gpuledger.ledger.series import SeriesGroup, SeriesValues, values_of
from gpuledger.recent import Budget, Recent
from gpuledger.records import GpuEvent
from sinks.remote_write.wire import STALE_VALUE, pack_value, series_prefix, timestamp_suffix

_MS_NS: Final = 1_000_000
MAX_SERIES_BYTES: Final = 128 * 2**20
_GROUP_BYTES: Final = 500
"""Bytes of a group in memory beside its labels, which are there twice, and its prefixes."""


def series_budget(max_bytes: int = MAX_SERIES_BYTES) -> Budget:
    """Return the bytes that the series of all partitions may take together."""
    return Budget(max_bytes=max_bytes)


@dataclass(slots=True)
class _Live:
    """The series of one group: a prefix for each metric, and which of them had a value last."""

    prefixes: tuple[bytes, ...]
    size_bytes: int = 0
    """What it takes of memory."""
    had: int = 0
    """Bit n is set where metric n had a value in the last tick."""


@dataclass(slots=True)
class _Node:
    latest_ms: int = -1
    """The latest time that was encoded."""
    seen_ns: int = 0
    """When its last tick came, by the monotonic clock."""
    groups: dict[SeriesGroup, _Live] = field(default_factory=dict)
    size_bytes: int = 0
    """What its groups take of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTick:
    """One node's tick as a part of a write request; such parts may be put one after another."""

    body: bytes
    samples: int
    is_behind: bool = False
    """Whether its node has sent a tick of this time or a later one: not every receiver takes it."""


class ActiveSeries:
    """The series of the nodes of one partition; `budget` is what those of all may take."""

    def __init__(self, *, budget: Budget | None = None) -> None:
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

    def encode(self, event: GpuEvent, *, now_ns: int = 0) -> EncodedTick:
        """Encode the samples of a node's next tick, and the ends of series.

        `now_ns` is the monotonic clock's time, for `end_silent`. Raises ValueError, and changes
        no series, for a time that the wire cannot carry or a holder that the event does not list.
        """
        suffix = timestamp_suffix(event.time_ns // _MS_NS)
        values = values_of(event)
        node = self._node(event.node, now_ns)
        node.seen_ns = now_ns
        parts: list[bytes] = []
        before_bytes = node.size_bytes
        for group, of_group in values.items():
            live = node.groups.get(group)
            if live is None:
                live = node.groups[group] = _begin(event.node, group)
                node.size_bytes += live.size_bytes
            _append(parts, live, of_group, suffix)
        for group in node.groups.keys() - values.keys():
            ended = node.groups.pop(group)
            node.size_bytes -= ended.size_bytes
            _end(parts, ended, suffix)
        if node.size_bytes != before_bytes:
            self._nodes.grow(node.size_bytes - before_bytes)
        return _put_together(parts, is_behind=_is_behind(node, event))

    def encode_past(self, event: GpuEvent, *, now_ns: int = 0) -> EncodedTick:
        """Encode the samples of a tick that others have followed: it begins and ends no series.

        Raises ValueError as `encode` does.
        """
        suffix = timestamp_suffix(event.time_ns // _MS_NS)
        parts: list[bytes] = []
        for group, of_group in values_of(event).items():
            _append(parts, _Live(prefixes=_prefixes(event.node, group)), of_group, suffix)
        node = self._node(event.node, now_ns)
        return _put_together(parts, is_behind=_is_behind(node, event))

    def has_silent(self, before_ns: int) -> bool:
        """Return whether there is something for `end_silent` to end."""
        return any(node.groups and node.seen_ns < before_ns for node in self._nodes.values())

    def end_silent(self, *, before_ns: int) -> Iterator[EncodedTick]:
        """End, node by node, all series of those whose last tick came before `before_ns`."""
        for node in self._nodes.values():
            if node.groups and node.seen_ns < before_ns:
                node.latest_ms += 1
                suffix, parts = timestamp_suffix(node.latest_ms), list[bytes]()
                for live in node.groups.values():
                    _end(parts, live, suffix)
                node.groups.clear()
                self._nodes.grow(-node.size_bytes)
                node.size_bytes = 0
                yield _put_together(parts)

    def _node(self, name: str, now_ns: int) -> _Node:
        self._nodes.go_on(now_ns)
        if (node := self._nodes.get(name)) is None:
            node = self._nodes[name] = _Node()
        return node

    def __len__(self) -> int:
        """Count the series that are alive."""
        groups = (live for node in self._nodes.values() for live in node.groups.values())
        return sum(live.had.bit_count() for live in groups)


def _begin(node: str, group: SeriesGroup) -> _Live:
    prefixes = _prefixes(node, group)
    labels_bytes = sum(map(len, group.label_values))
    return _Live(
        prefixes=prefixes, size_bytes=_GROUP_BYTES + labels_bytes + sum(map(len, prefixes))
    )


def _is_behind(node: _Node, event: GpuEvent) -> bool:
    """Return whether something of this time or later was encoded before; remember this one."""
    time_ms = event.time_ns // _MS_NS
    is_behind = time_ms <= node.latest_ms
    node.latest_ms = max(node.latest_ms, time_ms)
    return is_behind


def _put_together(parts: list[bytes], *, is_behind: bool = False) -> EncodedTick:
    return EncodedTick(body=b"".join(parts), samples=len(parts) // 3, is_behind=is_behind)


def _append(parts: list[bytes], live: _Live, values: SeriesValues, suffix: bytes) -> None:
    bit, has, had = 1, 0, live.had
    for prefix, value in zip(live.prefixes, values, strict=True):
        if value is not None:
            has |= bit
            parts += (prefix, pack_value(value), suffix)
        elif had & bit:
            parts += (prefix, STALE_VALUE, suffix)
        bit <<= 1
    live.had = has


def _end(parts: list[bytes], live: _Live, suffix: bytes) -> None:
    for number, prefix in enumerate(live.prefixes):
        if live.had >> number & 1:
            parts += (prefix, STALE_VALUE, suffix)


def _prefixes(node: str, group: SeriesGroup) -> tuple[bytes, ...]:
    family = group.family
    labels = [("node", node), *zip(family.labels, group.label_values, strict=True)]
    return tuple(series_prefix([("__name__", metric.name), *labels]) for metric in family.metrics)
