"""The entries of an event, with the pod, job, category and allocation of each.

An event lists pods, containers and allocations once, and its entries refer to them by position.
This module iterates over the entries and resolves these references for all code that writes rows or
series or displays names. It does no I/O.
"""

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, count
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from gpuledger.ledger.quantities import UNKNOWN, Amounts, apportion
from gpuledger.records import (
    BusyMethod,
    Category,
    EnergyMethod,
    Entry,
    EventAllocation,
    EventContainer,
    GpuBooks,
    GpuEvent,
    GpuReading,
    LateAdjustment,
    MemoryMethod,
    NamespaceDescription,
    NodeDescription,
    PodDescription,
    PodState,
)

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

_described = attrgetter("pods", "containers", "allocations", "namespaces", "node_description")
_encode_described: Final = msgspec.json.Encoder().encode


def digest_of_described(event: GpuEvent) -> bytes:
    """Return a digest of the descriptions in an event: pods, containers, allocations and so on.

    A reader of a node's consecutive events remembers these 32 bytes instead of the descriptions,
    which take up about 32 kB and are mostly not used in labels. Computing the digest takes as long
    as comparing descriptions.
    """
    return hashlib.sha256(_encode_described(_described(event))).digest()


@lru_cache(maxsize=8192)
def shared(value: H) -> H:
    """Return one shared object for all equal values, to save memory in data about many nodes."""
    return value


class _NoPod(NamedTuple):
    """Replaces the description of a pod that the event does not describe.

    All fields are absent, but the state is `unknown` if the allocation is unknown.
    """

    state: PodState | None = None
    uid: None = None
    namespace: None = None
    name: None = None
    owner_kind: None = None
    owner_name: None = None
    labels: None = None
    requested: None = None


class PodOfEntry(NamedTuple):
    """The pod and container of an entry, as far as the event identifies them.

    All fields are absent if the entry does not belong to a pod.
    """

    pod: PodDescription | None = None
    """The pod's description."""
    container_id: str | None = None
    """The container's id; absent for an allocation, for which the kubelet reports only a name."""
    container: str | None = None
    """The container's name."""
    described: Any = _NoPod()
    """The pod's description; if there is none, an object whose fields are all absent."""

    requested: Mapping[str, str] | None = None
    """The container's request in its pod's spec: the amount of each resource, as text."""
    namespace: NamespaceDescription | None = None
    """The description of the pod's namespace."""


_NO_NODE: Final = NodeDescription()
_NO_NAMESPACE: Final = NamespaceDescription(name="")
NO_POD: Final = PodOfEntry()
UNKNOWN_ALLOCATEE: Final = PodOfEntry(described=_NoPod(state=PodState.UNKNOWN))
"""The allocatee of a part whose allocation the kubelet did not report."""


class PodIndex:
    """Finds the pods of entries: the pod that used the GPU, or to which the GPU is allocated."""

    def __init__(self, event: GpuEvent) -> None:
        self._event = event
        self._users: dict[int, PodOfEntry] = {}
        self._allocatees: dict[int, PodOfEntry] = {}
        self._namespaces = {namespace.name: namespace for namespace in event.namespaces or ()}

    def user_of(self, entry: Entry) -> PodOfEntry:
        """Return the pod to which the entry is attributed.

        Raises `ValueError` if the entry refers to a container, or the container to a pod, that the
        event does not list.
        """
        position = entry.container
        if position is None:
            return NO_POD
        found = self._users.get(position)
        if found is None:
            # Cached, because entries of several GPUs may share a container.
            container: EventContainer = _at("container", position, self._event.containers)
            pod = None if container.pod is None else _at("pod", container.pod, self._event.pods)
            found = self._users[position] = self._pod_of(
                pod, container.container_id, container.name
            )
        return found

    def allocatee_of(self, entry: Entry) -> PodOfEntry:
        """Return the pod to which an idle entry's part of the GPU is allocated.

        Return `UNKNOWN_ALLOCATEE` if the allocation is unknown, `NO_POD` if there is none. Raises
        `ValueError` if the entry refers to an allocation, or the allocation to a pod, that the
        event does not list.
        """
        position = entry.allocation
        if position is None:
            is_unknown = entry.allocation_unknown and entry.job_id is None
            return UNKNOWN_ALLOCATEE if is_unknown else NO_POD
        found = self._allocatees.get(position)
        if found is None:
            allocatee: EventAllocation = _at("allocation", position, self._event.allocations)
            pod = _at("pod", allocatee.pod, self._event.pods)
            # The names of another node's pod are omitted, because any node could report such a pod.
            container = None if pod.name is None else allocatee.container
            found = self._allocatees[position] = self._pod_of(pod, None, container)
        return found

    def _pod_of(
        self, pod: PodDescription | None, container_id: str | None, container: str | None
    ) -> PodOfEntry:
        if pod is None:
            return PodOfEntry(None, container_id, container)
        namespace = self._namespaces.get(pod.namespace or "")
        request = (pod.requested or {}).get(container or "")
        requested = (
            {name: str(amount) for name, amount in request.resources.items()} if request else None
        )
        return PodOfEntry(pod, container_id, container, pod, requested, namespace)


class DeviceSlices(NamedTuple):
    """The slices of a device and of its whole physical GPU; MIG partitions a GPU by slices."""

    compute_slices: int | None
    """Compute slices of this device only."""
    memory_slices: int | None
    """Memory slices of this device only."""
    gpu_compute_slices: int | None
    """Compute slices of the whole physical GPU."""
    gpu_memory_slices: int | None
    """Memory slices of the whole physical GPU."""


UNKNOWN_SLICES: Final = DeviceSlices(None, None, None, None)
GPU_UNITS: Final = 27_720
"""The units in which the parts of a physical GPU are counted. Divisible by the number of slices of
any physical GPU with at most twelve, so that the units of a device are a whole number."""


def slices_of(books: GpuBooks) -> DeviceSlices:
    """Return the slices of the device that `books` are for, and of its physical GPU."""
    reading = books.reading
    if reading.parent_uuid is None and not reading.mig_enabled and books.compute_slices is None:
        compute, memory = reading.compute_slices, reading.memory_slices
        return DeviceSlices(compute, memory, compute, memory)
    return DeviceSlices(
        books.compute_slices,
        books.memory_slices,
        books.gpu_compute_slices,
        books.gpu_memory_slices,
    )


def gpu_units_of(books: GpuBooks) -> int | None:
    """Return how many of the `GPU_UNITS` of its physical GPU the device has, by compute slices.

    A GPU without known slices is a whole physical GPU. `None` if the device's part is unknown.
    """
    own, of_gpu = books.compute_slices, books.gpu_compute_slices
    if of_gpu is None:
        # The books of a GPU that is not partitioned have no slices.
        return GPU_UNITS if books.reading.parent_uuid is None else None
    return None if own is None or not of_gpu or GPU_UNITS % of_gpu else own * (GPU_UNITS // of_gpu)


def energy_method_of(books: GpuBooks) -> EnergyMethod | None:
    """Return how the entries' energy was determined.

    The method is in the books for a MIG instance without its own reading, otherwise in the reading.
    """
    reading = books.reading
    own = None if reading.energy_millijoules is None else reading.energy_method
    return books.energy_method or own


class RecordPosition(Protocol):
    """Position of an event's record in its topic."""

    @property
    def partition(self) -> int:
        """The partition of the topic."""

    @property
    def offset(self) -> int:
        """The offset in the partition."""


class Origin(NamedTuple):
    """Where and when an event was read by this process."""

    position: RecordPosition | None
    """Position of its record; `None` for rows that do not need it."""
    ingested_time_ns: int
    """When it was read, by the reader's clock, nanoseconds since the epoch."""


class BookedEntry(NamedTuple):
    """One entry, with all data of its event that concerns it: device, pod, node and times."""

    event: GpuEvent
    """The event."""
    origin: Origin | None
    """Where and when the event was read, if the caller provides it."""
    row: int
    """The entry's number within the event, from 0."""
    entry: Entry
    """The entry."""
    time_ns: int
    """End of the entry's time, nanoseconds since the epoch."""
    interval_ns: int
    """Length of the entry's time: one tick, or all ticks that a late adjustment covers."""
    books: GpuBooks
    """The GPU's books in the event's tick."""
    gpu: GpuReading
    """The GPU's readings."""
    busy_method: BusyMethod | None
    """How the busy time was determined, from the device's books or the late adjustment."""
    memory_method: MemoryMethod | None
    """How the memory was determined."""
    energy_method: EnergyMethod | None
    """How the energy was determined."""
    user: PodOfEntry
    """The pod to which the entry is attributed."""
    allocatee: PodOfEntry
    """For `idle`: the pod to which the unused part is allocated."""
    slices: DeviceSlices
    """The slices of the device and of its physical GPU."""
    requested: Mapping[str, str] | None
    """The request of the container that used the GPU, or to which the unused part is allocated."""
    node: NodeDescription
    """The description of the node; its fields are absent if nothing is known."""
    namespace: NamespaceDescription
    """The description of the namespace of the pod in `user` or `allocatee`."""
    apportioned: Amounts
    """The entry's part of the apportioned quantities."""
    job_id: str | None
    """The job to which the entry is attributed."""
    allocated_job_id: str | None
    """For `idle`: the job to which the unused part is allocated."""


def job_of(entry: Entry) -> str | None:
    """Return the job to which an entry is attributed; `None` if its category is not `job`."""
    return entry.job_id if entry.category is Category.JOB else None


def allocated_job_of(entry: Entry) -> str | None:
    """Return the job to which an idle entry's part is allocated; `None` if there is none."""
    return entry.job_id if entry.category is Category.IDLE and entry.allocation is None else None


def booked_entries(event: GpuEvent, origin: Origin | None = None) -> Iterator[BookedEntry]:
    """Yield the entries of each GPU of the event, then those of each late adjustment.

    Raises `ValueError` if an entry refers to a container or allocation, or a late adjustment to a
    GPU, that the event does not list.
    """
    pods = PodIndex(event)
    node = event.node_description or _NO_NODE
    row = count()
    for device in chain(_devices_of_tick(event), _devices_adjusted_late(event)):
        books = device.books
        slices = slices_of(books)
        for entry, apportioned in zip(device.entries, device.apportioned, strict=True):
            user, allocatee = pods.user_of(entry), pods.allocatee_of(entry)
            yield BookedEntry(
                event,
                origin,
                next(row),
                entry,
                device.time_ns,
                device.interval_ns,
                books,
                books.reading,
                device.busy_method,
                device.memory_method,
                device.energy_method,
                user,
                allocatee,
                slices,
                user.requested or allocatee.requested,
                node,
                user.namespace or allocatee.namespace or _NO_NAMESPACE,
                apportioned,
                job_of(entry),
                allocated_job_of(entry),
            )


class _DeviceEntries(NamedTuple):
    """The entries of one device over one interval, with the data that they share."""

    entries: Sequence[Entry]
    apportioned: Sequence[Amounts]
    """Each entry's part of the apportioned quantities."""
    books: GpuBooks
    """The device's books in the event's tick."""
    time_ns: int
    """End of the interval, nanoseconds since the epoch."""
    interval_ns: int
    busy_method: BusyMethod | None
    memory_method: MemoryMethod | None = None
    energy_method: EnergyMethod | None = None


def _devices_of_tick(event: GpuEvent) -> Iterator[_DeviceEntries]:
    for books in event.gpus:
        yield _DeviceEntries(
            entries=books.entries,
            apportioned=apportion(books, event.interval_ns),
            books=books,
            time_ns=event.time_ns,
            interval_ns=event.interval_ns,
            busy_method=books.busy_method,
            memory_method=books.memory_method,
            energy_method=energy_method_of(books),
        )


def _devices_adjusted_late(event: GpuEvent) -> Iterator[_DeviceEntries]:
    """Yield the entries of each late adjustment; raise `ValueError` if its GPU is not listed."""
    for adjustment in event.late_adjustments or ():
        yield _DeviceEntries(
            entries=adjustment.entries,
            # The chip's counters were already apportioned in the events of the adjusted ticks.
            apportioned=[UNKNOWN] * len(adjustment.entries),
            books=gpu_of(adjustment, event),
            time_ns=adjustment.until_time_ns,
            interval_ns=max(0, adjustment.until_time_ns - adjustment.from_time_ns),
            busy_method=adjustment.busy_method,
        )


def gpu_of(adjustment: LateAdjustment, event: GpuEvent) -> GpuBooks:
    """Return the event's readings and entries of the GPU to which the adjustment applies.

    Raises `ValueError` if the adjustment's position is not in the event's GPUs.
    """
    return _at("gpu", adjustment.gpu, event.gpus)


def _at(name: str, position: int, table: Sequence[T]) -> T:
    if position >= len(table):
        raise ValueError(
            f"{name}: position out of range: {position}; the event has {len(table)} {name}s"
        )
    return table[position]
