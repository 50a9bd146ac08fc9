"""An event to flat rows: one for each entry, with all that the event says of it.

Here lives that transformation. Pure; the rows are a function of the event alone, so that an event
that is read again gives the same bytes.
"""

from datetime import datetime, timedelta
from typing import Any, Final

from gpuledger.codec import encode
from gpuledger.records import Entry, EntryRow, GpuEvent, GpuReading
from sinks.entries import lines_of
from sinks.entry_owner import DeviceHolder, EntryOwner

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001  # its zone would be written as +00:00, not as Z

Fields = dict[str, Any]


def encoded_rows_of(event: GpuEvent) -> list[bytes]:
    """Return the event's rows as JSON; raises ValueError where `rows_of` does."""
    return [encode(row) for row in rows_of(event)]


def rows_of(event: GpuEvent) -> list[EntryRow]:
    """Return one row for each entry of each GPU of the event, and of each settlement, numbered.

    Raises ValueError where `lines_of` does.
    """
    tick = _tick(event)
    return [
        EntryRow(
            row=number,
            **tick,
            time=_written(line.time_ns),
            interval_seconds=line.interval_ns / 1e9,
            **_gpu(line.gpu),
            **_booked(line.entry),
            **_described(line.debtor),
            **_held(line.holder),
            sm_active_seconds=line.active[0],
            tensor_active_seconds=line.active[1],
            dram_active_seconds=line.active[2],
        )
        for number, line in enumerate(lines_of(event))
    ]


def _gpu(reading: GpuReading) -> Fields:
    return {"gpu_uuid": reading.uuid, "gpu_index": reading.index, "model": reading.model}


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


def _described(debtor: EntryOwner) -> Fields:
    identity = {"pod_uid": debtor.pod_uid, "container_id": debtor.container_id}
    pod = debtor.pod
    if pod is None:
        return identity
    return identity | {
        "pod_state": pod.state,
        "container": debtor.container,
        "namespace": pod.namespace,
        "pod": pod.name,
        "owner_kind": pod.owner_kind,
        "owner_name": pod.owner_name,
        "labels": pod.labels,
    }


def _held(holder: DeviceHolder | None) -> Fields:
    if holder is None:
        return {}
    return {
        "holder_state": holder.state,
        "holder_uid": holder.uid,
        "holder_namespace": holder.namespace,
        "holder_pod": holder.pod,
        "holder_container": holder.container,
    }
