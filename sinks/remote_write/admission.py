"""Which ticks are sent: new ones, as far as their time may be put into a series for good.

A receiver that takes a sample from the future refuses all that follow until time has caught up
(unless it takes samples out of order). So a tick is left out where it is further ahead of this
machine's clock than the settings allow; and where the node's clock has just leapt ahead and there
is a sign that it will be set back: it is ahead of this machine's clock, or the poll itself brings
an earlier tick behind it. A clock that stays ahead is believed after a minute. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from gpuledger.bus.protocol import Record
from gpuledger.records import GpuEvent
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
    overtaken = [False] * len(items)
    earliest_ns: dict[tuple[str, str], int] = {}
    for index in reversed(range(len(items))):
        if arrivals[index].order is TickOrder.CURRENT:
            event = items[index][1]
            boot = (event.node, event.boot_id)
            later_ns = earliest_ns.get(boot, event.time_ns + 1)
            overtaken[index] = later_ns <= event.time_ns
            earliest_ns[boot] = min(later_ns, event.time_ns)
    return overtaken
