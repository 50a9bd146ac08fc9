"""An event to the values of its series.

Here lives that transformation. Pure; nothing is remembered from one tick to the next.
"""

from typing import NamedTuple

from gpuledger.records import Account, Entry, GpuEvent, GpuReading, PodDescription
from sinks.describing import PodIndex, container_name
from sinks.remote_write.families import ACCOUNT, DEVICE, POD, Family

Values = tuple[float | None, ...]


class Group(NamedTuple):
    """The series of one thing: a family and the values of its labels."""

    family: Family
    label_values: tuple[str, ...]


def values_of(event: GpuEvent) -> dict[Group, Values]:
    """Give the values of each group, in the order of its family's metrics; `None` where unknown.

    Entries with the same labels, as of two containers whose names are not known yet, are summed:
    a series has one sample a tick.
    """
    values: dict[Group, Values] = {}
    pods = PodIndex(event.pods)
    interval_seconds = event.interval_ns / 1e9
    for books in event.gpus:
        gpu = (books.reading.uuid, str(books.reading.index))
        values[Group(DEVICE, (*gpu, books.reading.model or ""))] = _of_device(books.reading)
        if interval_seconds <= 0:
            continue
        for entry in books.entries:
            group = _group(entry, gpu, pods.pod_of(entry))
            found = _of_entry(entry, interval_seconds)
            values[group] = _sum(values[group], found) if group in values else found
    return values


def _group(entry: Entry, gpu: tuple[str, str], pod: PodDescription | None) -> Group:
    if entry.account is not Account.POD:
        return Group(ACCOUNT, (*gpu, entry.account.value, entry.method.value))
    names = _names(entry, pod)
    return Group(POD, (*gpu, *(name or "" for name in names), entry.method.value))


def _names(entry: Entry, pod: PodDescription | None) -> tuple[str | None, ...]:
    if pod is None:
        return None, None, entry.pod_uid, None, None, None
    return (
        pod.namespace,
        pod.name,
        entry.pod_uid or pod.uid,
        container_name(pod, entry),
        pod.owner_kind,
        pod.owner_name,
    )


def _of_device(reading: GpuReading) -> Values:
    return (
        reading.utilization_ratio,
        reading.memory_utilization_ratio,
        reading.memory_used_bytes,
        reading.memory_total_bytes,
        reading.memory_reserved_bytes,
        reading.power_watts,
        reading.energy_total_joules,
        reading.temperature_celsius,
        reading.sm_clock_hertz,
        reading.memory_clock_hertz,
    )


def _of_entry(entry: Entry, interval_seconds: float) -> Values:
    quantities = (entry.busy_seconds, entry.memory_byte_seconds, entry.joules)
    return tuple(None if one is None else one / interval_seconds for one in quantities)


def _sum(first: Values, second: Values) -> Values:
    pairs = zip(first, second, strict=True)
    return tuple(b if a is None else a if b is None else a + b for a, b in pairs)
