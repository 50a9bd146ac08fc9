"""An event to flat rows: one for each entry, with all that the event says of it.

Here lives that transformation. Pure; the rows are a function of the event alone, so that an event
that is read again gives the same bytes.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Final

from gpuledger.activity import split_activity
from gpuledger.records import DeviceAllocation, Entry, EntryRow, GpuBooks, GpuEvent
from gpuledger.twins import encode_twin, twin_of
from sinks.describing import Debtor, Debtors, gpu_of, holder_of

_Row: Final = twin_of(EntryRow)
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001  # its zone would be written as +00:00, not as Z

Fields = dict[str, Any]


def encoded_rows_of(event: GpuEvent) -> list[bytes]:
    """Give the event's rows as JSON; raises ValueError where `rows_of` does."""
    return [encode_twin(row) for row in rows_of(event)]


def rows_of(event: GpuEvent) -> list[EntryRow]:
    """Give one row for each entry of each GPU of the event, and of each settlement, numbered.

    Raises ValueError where an entry names a container or a holder that the event does not list, or
    a settlement a GPU.
    """
    tick, debtors = _tick(event), Debtors(event)
    fields = chain(_booked_rows(event), _settled_rows(event))
    return [
        _Row(
            row=number,
            **tick,
            **of_place,
            **_booked(entry),
            **_described(debtors.of(entry)),
            **_held(holder_of(entry, event.allocations)),
        )
        for number, (entry, of_place) in enumerate(fields)
    ]


def _booked_rows(event: GpuEvent) -> Iterator[tuple[Entry, Fields]]:
    interval = _interval(event.time_ns, event.interval_ns)
    for books in event.gpus:
        gpu = _gpu(books)
        activities = split_activity(books, event.interval_ns / 1e9)
        for entry, (sm, tensor, dram) in zip(books.entries, activities, strict=True):
            active: Fields = {
                "sm_active_seconds": sm,
                "tensor_active_seconds": tensor,
                "dram_active_seconds": dram,
            }
            yield entry, interval | gpu | active


def _settled_rows(event: GpuEvent) -> Iterator[tuple[Entry, Fields]]:
    for one in event.settlements or ():
        length_ns = max(0, one.until_time_ns - one.from_time_ns)
        for entry in one.entries:
            yield entry, _interval(one.until_time_ns, length_ns) | _gpu(gpu_of(one, event))


def _gpu(books: GpuBooks) -> Fields:
    reading = books.reading
    return {"gpu_uuid": reading.uuid, "gpu_index": reading.index, "model": reading.model}


def _interval(time_ns: int, interval_ns: int) -> Fields:
    return {"time": _written(time_ns), "interval_seconds": interval_ns / 1e9}


def _tick(event: GpuEvent) -> Fields:
    return {
        "node": event.node,
        "boot_id": event.boot_id,
        "seq": event.seq,
        "late": bool(event.late),
        "uncovered_seconds": event.uncovered_seconds,
    }


def _written(time_ns: int) -> str:
    at = _EPOCH + timedelta(microseconds=time_ns // 1000)
    return f"{at.isoformat(timespec='microseconds')}Z"


def _booked(entry: Entry) -> Fields:
    return {
        "account": entry.account,
        "method": entry.method,
        "busy_seconds": entry.busy_seconds,
        "memory_byte_seconds": entry.memory_byte_seconds,
        "joules": entry.joules,
    }


def _described(debtor: Debtor) -> Fields:
    identity = {"pod_uid": debtor.pod_uid, "container_id": debtor.container_id}
    pod = debtor.pod
    if pod is None:
        return identity
    return identity | {
        "container": debtor.container,
        "namespace": pod.namespace,
        "pod": pod.name,
        "owner_kind": pod.owner_kind,
        "owner_name": pod.owner_name,
        "labels": pod.labels,
    }


def _held(holder: DeviceAllocation | None) -> Fields:
    if holder is None:
        return {}
    return {
        "holder_namespace": holder.namespace,
        "holder_pod": holder.pod,
        "holder_container": holder.container,
    }
