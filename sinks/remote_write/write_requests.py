"""Ticks put together to write requests, split where a repetition would still be harmless.

A request holds at most one tick of a node, so at most one sample of a series. What may have been
sent before (everything published before this consumer came), and what is stamped no later than
something that its node has sent, goes one tick a request: a receiver that refuses an old sample
refuses the whole request, and no new sample may go down with it. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuledger.bus.protocol import Record
from sinks.remote_write.active_series import EncodedTick


@dataclass(frozen=True, kw_only=True)
class WrittenTick:
    """An encoded tick and the record it came in."""

    node: str
    time_ns: int
    record: Record
    encoded: EncodedTick


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """Ticks that travel together."""

    ticks: tuple[WrittenTick, ...]

    @property
    def body(self) -> bytes:
        """The `WriteRequest`, not compressed."""
        return b"".join(tick.encoded.body for tick in self.ticks)

    @property
    def samples(self) -> int:
        """How many samples it holds."""
        return sum(tick.encoded.samples for tick in self.ticks)

    @property
    def next_offset(self) -> int:
        """The offset after its last record."""
        return self.ticks[-1].record.offset + 1

    @property
    def newest_ns(self) -> int:
        """Time of its newest tick."""
        return max(tick.time_ns for tick in self.ticks)

    def split(self) -> "Iterator[WriteRequest]":
        """Yield a request for each tick."""
        return (WriteRequest(ticks=(tick,)) for tick in self.ticks)


def split_into_requests(
    ticks: Iterable[WrittenTick], *, max_samples: int, repeated_before: int
) -> Iterator[WriteRequest]:
    """Split the ticks of one partition into requests, in their order.

    `repeated_before` is the offset before which records may have been sent by somebody before us.
    """
    waiting: list[WrittenTick] = []
    for tick in ticks:
        if waiting and not _fits(tick, waiting, max_samples, repeated_before):
            yield WriteRequest(ticks=tuple(waiting))
            waiting = []
        waiting.append(tick)
    if waiting:
        yield WriteRequest(ticks=tuple(waiting))


def _fits(
    tick: WrittenTick, waiting: list[WrittenTick], max_samples: int, repeated_before: int
) -> bool:
    if waiting[-1].record.offset < repeated_before:
        return False
    if tick.encoded.is_behind or waiting[-1].encoded.is_behind:
        return False
    if any(other.node == tick.node for other in waiting):
        return False
    samples = sum(other.encoded.samples for other in waiting)
    return samples + tick.encoded.samples <= max_samples
