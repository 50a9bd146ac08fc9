"""An event to rows: one row an entry, values in the order of `sinks.store.columns`.

Here lives that transformation. Pure; no Arrow, no table.
"""

from collections.abc import Iterator
from typing import Any, Final

import orjson

from gpuledger.bus.protocol import Record
from gpuledger.records import GpuEvent
from sinks.entries import lines_of
from sinks.entry_owner import DeviceHolder, EntryOwner

Row = tuple[Any, ...]
_DAY_NS: Final = 86_400 * 10**9


def rows_of(event: GpuEvent, record: Record) -> Iterator[Row]:
    """Yield one row for each entry of each GPU of the event, and of each settlement.

    Raises ValueError where `lines_of` does.
    """
    tick = (event.node, event.boot_id, event.seq)
    source = (record.partition, record.offset)
    passage = (bool(event.late), event.uncovered_seconds)
    for entry, time_ns, interval_ns, gpu, debtor, holder, active in lines_of(event):
        yield (
            time_ns // _DAY_NS,
            *tick,
            time_ns // 1000,
            interval_ns / 1e9,
            gpu.uuid,
            gpu.index,
            gpu.model,
            entry.account.value,
            entry.method.value,
            *_pod(debtor),
            entry.busy_seconds,
            entry.memory_byte_seconds,
            entry.joules,
            *source,
            *_holder(holder),
            *active,
            *passage,
            None if debtor.pod is None else debtor.pod.state.value,
            None if holder is None else holder.state.value,
            None if holder is None else holder.uid,
        )


def _pod(debtor: EntryOwner) -> Row:
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


def _holder(holder: DeviceHolder | None) -> Row:
    if holder is None:
        return None, None, None
    return holder.namespace, holder.pod, holder.container


def _json(labels: dict[str, str]) -> str:
    return orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode()
