"""An event to the values of its series.

Here lives that transformation. Pure; nothing is remembered from one tick to the next.
"""

from typing import Final, NamedTuple

from gpuledger.activity import Activity, split_activity
from gpuledger.records import (
    Account,
    Entry,
    GpuEvent,
    GpuReading,
    HolderState,
)
from sinks.entry_owner import DeviceHolder, EntryOwner, EntryOwners, holder_of
from sinks.remote_write.families import ACCOUNT, DEVICE, INSTANCE, NODE, POD, Family

Values = tuple[float | None, ...]
_Memory = tuple[str | None, int | str]
"""A memory that compute instances share: the GPU, and the GPU instance or the instance itself."""


MAX_GROUPS: Final = 16_384
"""Things of which a tick has series: twice what 16 GPUs shared by 256 have. What a node says in
40 bytes is 5 kB once its labels are written, so that a tick of these comes to 85 MB at most."""


class SeriesGroup(NamedTuple):
    """The series of one thing: a family and the values of its labels."""

    family: Family
    label_values: tuple[str, ...]


def values_of(event: GpuEvent) -> dict[SeriesGroup, Values]:
    """Return the values of each group, in the order of its family's metrics; `None` where unknown.

    Entries with the same labels, as of two containers whose names are not known yet, are summed:
    a series has one sample a tick. Raises ValueError where an entry names a holder that the event
    does not list, and where there are more than `MAX_GROUPS`.
    """
    values: dict[SeriesGroup, Values] = {}
    if event.uncovered_seconds is not None:
        values[SeriesGroup(NODE, ())] = (event.uncovered_seconds,)
    debtors = EntryOwners(event)
    memories: set[_Memory] = set()
    interval_seconds = event.interval_ns / 1e9
    for books in event.gpus:
        gpu = (books.reading.uuid, str(books.reading.index))
        if books.reading.parent_uuid is None:
            values[SeriesGroup(DEVICE, (*gpu, books.reading.model or ""))] = _of_device(
                books.reading
            )
        else:
            values[_instance_group(books.reading)] = _of_instance(books.reading, memories)
        if interval_seconds <= 0:
            continue
        activities = split_activity(books, interval_seconds)
        for entry, active in zip(books.entries, activities, strict=True):
            if entry.account is Account.POD:
                group = _pod_group(entry, gpu, debtors.of(entry))
            else:
                group = _account_group(entry, gpu, holder_of(entry, event))
            found = _of_entry(entry, active, interval_seconds)
            values[group] = _sum(values[group], found) if group in values else found
        if len(values) > MAX_GROUPS:
            raise ValueError(f"gpus: more than {MAX_GROUPS} devices and accounts have series")
    return values


def _instance_group(reading: GpuReading) -> SeriesGroup:
    places = (reading.gpu_instance, reading.compute_instance)
    labels = (
        reading.uuid,
        str(reading.index),
        reading.model or "",
        reading.parent_uuid or "",
        *("" if place is None else str(place) for place in places),
        reading.mig_profile or "",
    )
    return SeriesGroup(INSTANCE, labels)


def _account_group(entry: Entry, gpu: tuple[str, str], holder: DeviceHolder | None) -> SeriesGroup:
    return SeriesGroup(
        ACCOUNT, (*gpu, entry.account.value, entry.method.value, *_holder_names(holder))
    )


def _holder_names(holder: DeviceHolder | None) -> tuple[str, str, str, str]:
    if holder is None:
        return "", "", "", ""
    state = holder.state.value if holder.state is HolderState.UNKNOWN else ""
    return holder.namespace or "", holder.pod or "", holder.container or "", state


def _pod_group(entry: Entry, gpu: tuple[str, str], debtor: EntryOwner) -> SeriesGroup:
    names = _names(debtor)
    return SeriesGroup(POD, (*gpu, *(name or "" for name in names), entry.method.value))


def _names(debtor: EntryOwner) -> tuple[str | None, ...]:
    pod = debtor.pod
    if pod is None:
        return None, None, debtor.pod_uid, None, None, None
    return (
        pod.namespace,
        pod.name,
        debtor.pod_uid,
        debtor.container,
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


def _of_instance(reading: GpuReading, memories: set[_Memory]) -> Values:
    """Return an instance's values; a memory is given once and then found in `memories`."""
    place = reading.uuid if reading.gpu_instance is None else reading.gpu_instance
    memory = (reading.parent_uuid, place)
    if memory in memories or reading.memory_total_bytes is None:
        return (reading.utilization_ratio, None, None, None)
    memories.add(memory)
    return (
        reading.utilization_ratio,
        reading.memory_used_bytes,
        reading.memory_total_bytes,
        reading.memory_reserved_bytes,
    )


def _of_entry(entry: Entry, active: Activity, interval_seconds: float) -> Values:
    quantities = (
        entry.busy_seconds,
        entry.memory_byte_seconds,
        entry.joules,
        *active,
    )
    return tuple(None if one is None else one / interval_seconds for one in quantities)


def _sum(first: Values, second: Values) -> Values:
    pairs = zip(first, second, strict=True)
    return tuple(b if a is None else a if b is None else a + b for a, b in pairs)
