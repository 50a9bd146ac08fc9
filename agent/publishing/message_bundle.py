"""What leaves the node, as bytes: each tick, incident and inventory is one parcel.

Here lives the encoding, keyed by node and stamped with the record's own time. All parcels leave
through one line, in the order in which they were put; no queue and no broker here.
"""

from typing import Final, Protocol

import msgspec
import structlog

from agent.metrics import VALUES_CUT
from agent.sampling import NodeTick
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode, validate
from gpuledger.records import Incident, Inventory
from gpuledger.records.fitting import Cut, fit
from gpuledger.runtime.logs import Repeats
from gpuledger.topics import INCIDENTS, INVENTORY, PROCESSES, READINGS, SAMPLES

_NS_PER_MS: Final = 1_000_000
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()

Parcel = tuple[tuple[str, Message], ...]
"""Messages that belong together, each with its topic; as bytes they take a fraction of the memory
that their records do."""


class _NodeRecord(Protocol):
    @property
    def node(self) -> str: ...
    @property
    def time_ns(self) -> int: ...


def pack(tick: NodeTick) -> Parcel:
    """Make a tick's parcel: the sample, its other readings, then what happened to processes.

    The sample is the first to be sent: it is what is booked.
    """
    readings = ((READINGS.name, _message(tick.readings)),) if tick.readings.gpus else ()
    processes = ((PROCESSES.name, _message(record)) for record in tick.processes)
    return ((SAMPLES.name, _message(tick.sample)), *readings, *processes)


def pack_incident(incident: Incident) -> Parcel:
    """Make an incident's parcel."""
    return ((INCIDENTS.name, _message(incident)),)


def pack_inventory(inventory: Inventory) -> Parcel:
    """Make an inventory's parcel."""
    return ((INVENTORY.name, _message(inventory)),)


def time_ms(parcel: Parcel) -> int:
    """Return the event time of a parcel's first message, milliseconds since the epoch."""
    return parcel[0][1].timestamp_ms


def size_bytes(parcel: Parcel) -> int:
    """Return the size of a parcel's values."""
    return sum(len(message.value or b"") for _, message in parcel)


def _message(record: _NodeRecord) -> Message:
    return Message(
        key=record.node.encode(), value=_value(record), timestamp_ms=record.time_ns // _NS_PER_MS
    )


def _value(record: _NodeRecord) -> bytes:
    """Encode a record; what is longer than it may be, by whatever the node was told, is cut.

    Raises `msgspec.ValidationError` where a number is none that its field may have.
    """
    try:
        validate(record)
    except msgspec.ValidationError:
        record, cut = fit(record)
        _tell_cut(cut)
        validate(record)
    return encode(record)


def _tell_cut(cut: Cut) -> None:
    for name, count in cut.items():
        VALUES_CUT.labels(field=name).inc(count)
        if told := _repeats.count(name, more=count):
            _log.warning("values_shortened", field=name, count=told)
