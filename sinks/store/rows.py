"""An event to rows: one row an entry, values in the order of `sinks.store.columns`.

Here lives that transformation. Pure; no Arrow, no table.
"""

from collections.abc import Iterator
from typing import Any, Final

import orjson

from gpuledger.activity import split_activity
from gpuledger.bus.protocol import Record
from gpuledger.records import DeviceAllocation, Entry, GpuBooks, GpuEvent
from sinks.describing import Debtor, Debtors, gpu_of, holder_of

Row = tuple[Any, ...]
_DAY_NS: Final = 86_400 * 10**9
# The chip's counters of those ticks are split already, by what they said then.
_NO_ACTIVITY: Final = (None, None, None)


def rows_of(event: GpuEvent, record: Record) -> Iterator[Row]:
    """Give one row for each entry of each GPU of the event, and of each settlement.

    Raises ValueError where an entry names a container or a holder that the event does not list, or
    a settlement a GPU.
    """
    debtors = Debtors(event)
    tick = _interval(event, event.time_ns, event.interval_ns)
    source = (record.partition, record.offset)
    passage = (bool(event.late), event.uncovered_seconds)
    for books in event.gpus:
        activities = split_activity(books, event.interval_ns / 1e9)
        for entry, active in zip(books.entries, activities, strict=True):
            yield (
                *tick,
                *_gpu(books),
                *_booked(entry, debtors),
                *source,
                *_holder(holder_of(entry, event.allocations)),
                *active,
                *passage,
            )
    for settlement in event.settlements or ():
        until_ns = settlement.until_time_ns
        ticks = _interval(event, until_ns, max(0, until_ns - settlement.from_time_ns))
        for entry in settlement.entries:
            yield (
                *ticks,
                *_gpu(gpu_of(settlement, event)),
                *_booked(entry, debtors),
                *source,
                *_holder(None),
                *_NO_ACTIVITY,
                *passage,
            )


def _interval(event: GpuEvent, time_ns: int, interval_ns: int) -> Row:
    return (
        time_ns // _DAY_NS,
        event.node,
        event.boot_id,
        event.seq,
        time_ns // 1000,
        interval_ns / 1e9,
    )


def _booked(entry: Entry, debtors: Debtors) -> Row:
    return (
        entry.account.value,
        entry.method.value,
        *_pod(debtors.of(entry)),
        entry.busy_seconds,
        entry.memory_byte_seconds,
        entry.joules,
    )


def _gpu(books: GpuBooks) -> Row:
    return books.reading.uuid, books.reading.index, books.reading.model


def _pod(debtor: Debtor) -> Row:
    pod = debtor.pod
    if pod is None:
        return debtor.pod_uid, debtor.container_id, None, None, None, None, None, None
    return (
        debtor.pod_uid,
        debtor.container_id,
        debtor.container,
        pod.namespace,
        pod.name,
        pod.owner_kind,
        pod.owner_name,
        None if pod.labels is None else _json(pod.labels),
    )


def _holder(holder: DeviceAllocation | None) -> Row:
    if holder is None:
        return None, None, None
    return holder.namespace, holder.pod, holder.container


def _json(labels: dict[str, str]) -> str:
    return orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode()
