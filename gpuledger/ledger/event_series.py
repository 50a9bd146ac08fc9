"""The values of the series of one event.

Here lives how an event fills the families of `gpuledger.ledger.series`. Pure; nothing is remembered
from one tick to the next.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Final

from gpuledger.ledger.entries import NO_HOLDER, DeviceHolder, EntryOwner, PodIndex, holder_of
from gpuledger.ledger.quantities import BOOKED, Amounts, apportion
from gpuledger.ledger.series import (
    ACCOUNT,
    DEVICE,
    INSTANCE,
    NODE,
    POD,
    SeriesGroup,
    SeriesValues,
)
from gpuledger.records import Account, Entry, GpuEvent, GpuReading, HolderState

_Memory = tuple[str | None, int | str]
"""A memory that compute instances share: the GPU, and the GPU instance or the instance itself."""
MAX_GROUPS: Final = 16_384
"""Things of which a tick has series: twice what 16 GPUs shared by 256 have. What a node says in
40 bytes is 5 kB once its labels are written, so that a tick of these comes to 85 MB at most."""
_NO_NAMES: Final = ("", "", "", "")
_booked_amounts: Final[Callable[[Entry], Amounts]] = attrgetter(
    *(quantity.name for quantity in BOOKED)
)


def values_of(event: GpuEvent) -> dict[SeriesGroup, SeriesValues]:
    """Return the values of each group, in the order of its family's metrics; `None` where unknown.

    Entries with the same labels, as of two containers whose names are not known yet, are summed:
    a series has one sample a tick. Raises ValueError where an entry names a holder that the event
    does not list, and where there are more than `MAX_GROUPS`.
    """
    values: dict[SeriesGroup, SeriesValues] = {}
    if event.gap_ns is not None:
        values[SeriesGroup(NODE, ())] = (event.gap_ns / 1e9,)
    pods = PodIndex(event)
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
        of_entries = apportion(books, interval_seconds)
        for entry, apportioned in zip(books.entries, of_entries, strict=True):
            if entry.account is Account.POD:
                group = _pod_group(entry, gpu, pods.owner_of(entry))
            else:
                group = _account_group(entry, gpu, holder_of(entry, event))
            amounts = (*_booked_amounts(entry), *apportioned)
            # Of a list: a tuple of a generator takes a third longer, for each entry of each tick.
            found = tuple(
                [None if amount is None else amount / interval_seconds for amount in amounts]
            )
            values[group] = _sum(values[group], found) if group in values else found
        if len(values) > MAX_GROUPS:
            raise ValueError(f"gpus: more than {MAX_GROUPS} devices and accounts have series")
    return values


def _instance_group(reading: GpuReading) -> SeriesGroup:
    numbers = (reading.gpu_instance, reading.compute_instance)
    labels = (
        reading.uuid,
        str(reading.index),
        reading.model or "",
        reading.parent_uuid or "",
        *("" if number is None else str(number) for number in numbers),
        reading.mig_profile or "",
    )
    return SeriesGroup(INSTANCE, labels)


def _account_group(entry: Entry, gpu: tuple[str, str], holder: DeviceHolder) -> SeriesGroup:
    names = _NO_NAMES
    if holder is not NO_HOLDER:
        # Where the holder is known, its names say so: one label less to write.
        state = HolderState.UNKNOWN.value if holder.state is HolderState.UNKNOWN else ""
        names = (holder.namespace or "", holder.pod or "", holder.container or "", state)
    return SeriesGroup(ACCOUNT, (*gpu, entry.account.value, entry.method.value, *names))


def _pod_group(entry: Entry, gpu: tuple[str, str], owner: EntryOwner) -> SeriesGroup:
    pod = owner.described
    names = (
        pod.namespace,
        pod.name,
        owner.pod_uid,
        owner.container,
        pod.owner_kind,
        pod.owner_name,
    )
    return SeriesGroup(POD, (*gpu, *(name or "" for name in names), entry.method.value))


def _of_device(reading: GpuReading) -> SeriesValues:
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


def _of_instance(reading: GpuReading, memories: set[_Memory]) -> SeriesValues:
    """Return an instance's values; a memory is given once and then found in `memories`."""
    instance = reading.uuid if reading.gpu_instance is None else reading.gpu_instance
    memory = (reading.parent_uuid, instance)
    if memory in memories or reading.memory_total_bytes is None:
        return (reading.utilization_ratio, None, None, None)
    memories.add(memory)
    return (
        reading.utilization_ratio,
        reading.memory_used_bytes,
        reading.memory_total_bytes,
        reading.memory_reserved_bytes,
    )


def _sum(first: SeriesValues, second: SeriesValues) -> SeriesValues:
    pairs = zip(first, second, strict=True)
    return tuple(b if a is None else a if b is None else a + b for a, b in pairs)
