"""From what was polled to write requests: which ticks are sent, and which travel together. Pure.

**Admission** (`admit`). A receiver that takes a sample from the future refuses all that follow
until time has caught up (unless it takes samples out of order). So a tick is left out where it is
further ahead of this machine's clock than the settings allow; and where the node's clock has just
leapt ahead and there is a sign that it will be set back: it is ahead of this machine's clock, or
the poll itself brings an earlier tick behind it. A clock that stays ahead is believed after a
minute.

**Requests** (`split_into_requests`). A request holds at most one tick of a node, so at most one
sample of a series. What may have been sent before (everything published before this consumer
came), and what is stamped no later than something that its node has sent, goes one tick a request:
a receiver that refuses an old sample refuses the whole request, and no new sample may go down with
it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpuledger.bus.protocol import Record
from gpuledger.keys import node_key
from gpuledger.records import GpuEvent
from sinks.remote_write.active_series import EncodedTick
from sinks.timelines import LEAP_NS, Arrival, TickOrder, Timelines

FUTURE: Final = "future"
DUPLICATE: Final = "duplicate"


class Admitted(NamedTuple):
    """A tick of a poll, and whether it is to be sent."""

    record: Record
    event: GpuEvent
    order: TickOrder
    """Where it stands in its node's time."""
    refusal: str | None
    """Why it is not sent, in a word; `None` where it is."""


def admit(
    items: Sequence[tuple[Record, GpuEvent]],
    timelines: Timelines,
    *,
    time_ns: int,
    monotonic_ns: int,
    max_ahead_ns: int,
) -> Iterator[Admitted]:
    """Yield the ticks of a poll in their order; the times are those of this machine's clocks."""
    arrivals = [timelines.observe(event, received_ns=monotonic_ns) for _, event in items]
    overtaken = _overtaken(items, arrivals)
    for (record, event), arrival, is_overtaken in zip(items, arrivals, overtaken, strict=True):
        ahead_ns = event.time_ns - time_ns
        will_be_set_back = arrival.has_leapt and (ahead_ns > LEAP_NS or is_overtaken)
        refusal = None
        if arrival.order is TickOrder.REPEATED:
            refusal = DUPLICATE
        elif ahead_ns > max_ahead_ns or will_be_set_back:
            refusal = FUTURE
        yield Admitted(record, event, arrival.order, refusal)


def _overtaken(items: Sequence[tuple[Record, GpuEvent]], arrivals: Sequence[Arrival]) -> list[bool]:
    """Return for each tick whether a later one of its boot is stamped no later."""
    # From behind, so that one pass knows the earliest time of all that follow.
    overtaken = [False] * len(items)
    earliest_ns: dict[tuple[str, str], int] = {}
    for index in reversed(range(len(items))):
        if arrivals[index].order is TickOrder.CURRENT:
            event = items[index][1]
            boot = (node_key(event), event.boot_id)
            later_ns = earliest_ns.get(boot, event.time_ns + 1)
            overtaken[index] = later_ns <= event.time_ns
            earliest_ns[boot] = min(later_ns, event.time_ns)
    return overtaken


@dataclass(frozen=True, kw_only=True)
class WrittenTick:
    """An encoded tick and the record it came in."""

    node: str
    """The key of its node."""
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
    # Prometheus rolls a whole request of remote-write 1.0 back for one old sample in it, wherever
    # it stands, and answers 400, which must not be sent again: what may be old goes alone.
    if waiting[-1].record.offset < repeated_before:
        return False
    if tick.encoded.is_behind or waiting[-1].encoded.is_behind:
        return False
    # At most one sample of a series: were they not in order, Prometheus would lose the older one
    # and answer 204.
    if any(other.node == tick.node for other in waiting):
        return False
    samples = sum(other.encoded.samples for other in waiting)
    return samples + tick.encoded.samples <= max_samples
