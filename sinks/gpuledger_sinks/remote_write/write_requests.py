"""Makes write requests from polled ticks: which ticks are sent, and which are sent together. Pure.

**Admission** (`admit`). If a receiver accepts a sample from the future, it rejects all following
samples of the series until that time (unless it accepts samples out of order). A tick is therefore
left out if it is further ahead of this machine's clock than the settings allow. It is also left out
if its node's clock has just leapt ahead and is likely to be set back. A clock is likely to be set
back if the tick is ahead of this machine's clock, or if a later tick of the same poll has an
earlier time. A clock that stays ahead is trusted after a minute.

A tick that is older than the settings allow is left out as well, because a receiver may answer it
with 5xx indefinitely.

**Requests** (`split_into_requests`). Ticks are sent in order, and a request may contain several
ticks of one node. A tick is sent separately if its node has already sent this or a later time, or
if its node recently had a rejection, because a receiver may reject a whole request for one sample.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import node_key
from gpuledger_sinks.remote_write.active_series import EncodedTick
from gpuledger_sinks.remote_write.wire import Version, encode_request
from gpuledger_sinks.settings import RemoteWriteSettings
from gpuledger_sinks.timelines import LEAP_NS, Arrival, TickOrder, TickRecord, Timelines

FUTURE: Final = "future"
TOO_OLD: Final = "too_old"
DUPLICATE: Final = "duplicate"


class Admitted(NamedTuple):
    """A polled tick, with the decision whether to send it."""

    record: Record
    event: TickRecord
    order: TickOrder
    """Whether the tick is its node's newest, a repetition, or a tick of an earlier boot."""
    refusal: str | None
    """Why the tick is not sent, in one word; `None` if it is sent."""


class AgeLimits(NamedTuple):
    """How far from this machine's clock a tick may be, in nanoseconds."""

    max_ahead_ns: int
    max_age_ns: int | None
    """`None` if there is no limit."""

    @classmethod
    def of(cls, settings: RemoteWriteSettings) -> "AgeLimits":
        """Return the limits from the settings."""
        max_age_ns = round(settings.max_age_seconds * NS_PER_SECOND)
        return cls(round(settings.max_future_seconds * NS_PER_SECOND), max_age_ns or None)


def admit(
    items: Sequence[tuple[Record, TickRecord]],
    timelines: Timelines,
    *,
    time_ns: int,
    monotonic_ns: int,
    limits: AgeLimits,
) -> Iterator[Admitted]:
    """Yield the ticks of a poll in order, with the decision whether to send each.

    `time_ns` and `monotonic_ns` are the current times of this machine's clocks.
    """
    arrivals = [timelines.observe(event, received_ns=monotonic_ns) for _, event in items]
    overtaken = _overtaken(items, arrivals)
    for (record, event), arrival, is_overtaken in zip(items, arrivals, overtaken, strict=True):
        ahead_ns = event.time_ns - time_ns
        will_be_set_back = arrival.has_leapt and (ahead_ns > LEAP_NS or is_overtaken)
        refusal = None
        if arrival.order is TickOrder.REPEATED:
            refusal = DUPLICATE
        elif ahead_ns > limits.max_ahead_ns or will_be_set_back:
            refusal = FUTURE
        elif limits.max_age_ns is not None and -ahead_ns > limits.max_age_ns:
            refusal = TOO_OLD
        yield Admitted(record, event, arrival.order, refusal)


def _overtaken(
    items: Sequence[tuple[Record, TickRecord]], arrivals: Sequence[Arrival]
) -> list[bool]:
    """Return for each tick whether a later one of the same boot has the same or an earlier time."""
    # In reverse, so that the earliest time of all following ticks is known in one pass.
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
    """An encoded tick and its record."""

    node: str
    """The key of its node."""
    time_ns: int
    record: Record
    encoded: EncodedTick
    is_late: bool = False
    """Whether the join marked the tick as late; it may be older than samples sent before."""
    is_repeated: bool = False
    """Whether the node's next samples include all information of these samples."""


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """Ticks that are sent together."""

    ticks: tuple[WrittenTick, ...]
    sent_before: int = 0
    """Once this request is sent, all ticks before this offset are sent."""

    def encode(self, version: Version) -> bytes:
        """Return the uncompressed body."""
        return encode_request(
            version, chain.from_iterable(tick.encoded.timed for tick in self.ticks)
        )

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(tick.encoded.samples for tick in self.ticks)

    @property
    def newest_ns(self) -> int:
        """Time of the newest tick in the request, in nanoseconds since the epoch."""
        return max(tick.time_ns for tick in self.ticks)

    def halves(self) -> "tuple[WriteRequest, WriteRequest]":
        """Split a request of at least two ticks; return requests with its first and second half."""
        half = len(self.ticks) // 2
        return WriteRequest(ticks=self.ticks[:half]), WriteRequest(ticks=self.ticks[half:])


def split_into_requests(
    ticks: Iterable[WrittenTick], *, max_samples: int, is_apart: Callable[[str], bool]
) -> Iterator[WriteRequest]:
    """Split the ticks of one partition into requests, in order.

    `is_apart` returns whether a node's ticks must be sent separately. It is called for each tick
    just before the tick is added to a request.
    """
    together: list[WrittenTick] = []
    samples, is_full = 0, False
    for tick in ticks:
        # Prometheus rejects a whole request of remote-write 1.0 with 400 because of one old sample,
        # and such a request must not be sent again.
        is_alone = tick.encoded.is_behind or is_apart(tick.node)
        if together and (is_full or is_alone or samples + tick.encoded.samples > max_samples):
            # `sent_before` is at most this tick's offset, because this tick is not in the request.
            sent_before = min(together[-1].record.offset + 1, tick.record.offset)
            yield WriteRequest(ticks=tuple(together), sent_before=sent_before)
            together, samples = [], 0
        together.append(tick)
        samples += tick.encoded.samples
        is_full = is_alone
    if together:
        yield WriteRequest(ticks=tuple(together), sent_before=together[-1].record.offset + 1)
