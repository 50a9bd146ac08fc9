"""Makes flat rows from an event: one self-contained JSON object per entry.

Encodes the values of `gpuledger.ledger.rows` for the topic. Pure: rows depend only on the event and
on the time when it was read.
"""

from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Final

from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_US, Clock
from gpuledger.codec import encode
from gpuledger.ledger.entries import Origin, booked_entries
from gpuledger.ledger.rows import TOPIC_COLUMNS, ColumnType, EntryRow, row_maker
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness
from gpuledger_sinks.kafka_sink import KafkaSink, open_kafka_sink
from gpuledger_sinks.registry import ROWS
from gpuledger_sinks.settings import RowsSettings

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001  # with a zone, isoformat would append +00:00


def encoded_rows_of(event: GpuEvent, *, ingested_time_ns: int) -> list[bytes]:
    """Return one encoded row for each entry of each GPU and for each late adjustment.

    Raises ValueError if the event refers to missing entries (`booked_entries`).
    """
    origin = Origin(None, ingested_time_ns)
    return [encode(_make_row(*booked)) for booked in booked_entries(event, origin)]


def _as_text(time_ns: int) -> str:
    at = _EPOCH + timedelta(microseconds=time_ns // NS_PER_US)
    return f"{at.isoformat(timespec='microseconds')}Z"


_make_row: Final = row_maker(
    TOPIC_COLUMNS,
    {
        ColumnType.TIME: "as_text({})",
        ColumnType.FLAG: "bool({})",
    },
    {"as_text": _as_text},
    make=EntryRow,
)


def open_sink(
    *,
    bus: Bus,
    settings: RowsSettings,
    readiness: Readiness,
    clock: Clock,
    group: str,
) -> AbstractAsyncContextManager[KafkaSink]:
    """Return the sink that writes the flat rows of every event."""
    return open_kafka_sink(
        ROWS,
        bus=bus,
        settings=settings.in_installation(bus.topics),
        values_of=lambda event: encoded_rows_of(event, ingested_time_ns=clock.time_ns()),
        readiness=readiness,
        clock=clock,
        group=group,
    )
