"""The samples of one event whose tick is an interval, without counters."""

from typing import Final

from gpuledger.bus.protocol import Record
from gpuledger.keys import node_key
from gpuledger.ledger.series import values_of
from gpuledger.records import GpuEvent
from gpuledger_sinks.remote_write.node_intervals import IntervalSamples

RECORD: Final = Record("events", 0, 0, 0, None, None)


def samples_of(event: GpuEvent, *, is_past: bool = False) -> IntervalSamples:
    """Return the samples of a tick."""
    return IntervalSamples(
        node=node_key(event),
        time_ns=event.time_ns,
        values=values_of(event),
        record=RECORD,
        is_past=is_past,
    )
