"""The entries of an event, and whose each is: on which account, of which pod, held by whom.

An event names containers, pods and allocations once, and its entries point to them by position.
Here lives the walk over the entries and these look-ups, for all who write rows or series or show
names. Pure.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from gpuledger.ledger.quantities import UNKNOWN, Amounts, apportion
from gpuledger.records import (
    BusyMethod,
    ContainerRef,
    DeviceAllocation,
    EnergyMethod,
    Entry,
    GpuBooks,
    GpuEvent,
    GpuReading,
    HolderState,
    MemoryMethod,
    PodDescription,
    Settlement,
)

T = TypeVar("T")


class _NoPod(NamedTuple):
    """What is said of a pod that the event does not describe."""

    state: None = None
    namespace: None = None
    name: None = None
    owner_kind: None = None
    owner_name: None = None
    labels: None = None


class EntryOwner(NamedTuple):
    """On whom an entry is booked, as far as the event says it; all absent where on no pod."""

    pod: PodDescription | None = None
    """The pod's description."""
    pod_uid: str | None = None
    """The pod's UID."""
    container_id: str | None = None
    """The container's id."""
    container: str | None = None
    """The container's name."""
    described: Any = _NoPod()
    """The pod's description; where there is none, an object whose fields are all absent."""


_NO_POD: Final = EntryOwner()


class PodIndex:
    """The pods and containers of one event."""

    def __init__(self, event: GpuEvent) -> None:
        self._containers = event.containers
        self._found: dict[int, EntryOwner] = {}
        self._by_uid = {pod.uid: pod for pod in event.pods if pod.uid is not None}
        self._by_container = {
            container_id: pod for pod in event.pods for container_id in pod.container_ids
        }

    def owner_of(self, entry: Entry) -> EntryOwner:
        """Return on whom the entry is booked.

        Raises ValueError where the entry names a position that the event's containers do not have.
        """
        position = entry.container
        if position is None:
            return _NO_POD
        found = self._found.get(position)
        if found is None:
            # Several GPUs have entries on one container.
            ref: ContainerRef = _at("container", position, self._containers)
            found = self._found[position] = self._look_up(ref)
        return found

    def _look_up(self, ref: ContainerRef) -> EntryOwner:
        pod = self._by_container.get(ref.container_id or "") or self._by_uid.get(ref.pod_uid or "")
        if pod is None:
            return EntryOwner(None, ref.pod_uid, ref.container_id)
        # A container that the record does not name yet, as one that has just been started again,
        # has none.
        name = (pod.container_names or {}).get(ref.container_id or "")
        return EntryOwner(pod, ref.pod_uid or pod.uid, ref.container_id, name, pod)


class DeviceHolder(NamedTuple):
    """Who held a part of a GPU that nobody used; without names where the node's word is all."""

    state: HolderState | None
    """Whether a pod of the event's node is known to have the name that the node gave; absent where
    nobody held the part."""
    uid: str | None = None
    """The pod's UID."""
    namespace: str | None = None
    """The pod's namespace."""
    pod: str | None = None
    """The pod's name."""
    container: str | None = None
    """The container's name."""


NO_HOLDER: Final = DeviceHolder(None)
_UNKNOWN_HOLDER: Final = DeviceHolder(HolderState.UNKNOWN)


def holder_of(entry: Entry, event: GpuEvent) -> DeviceHolder:
    """Return who held the part of the GPU that the entry says was idle.

    Raises ValueError where the entry names a position that the event's allocations do not have.
    """
    position = entry.allocation
    if position is None:
        return NO_HOLDER
    return name_holder(_at("allocation", position, event.allocations), position, event)


def name_holder(held: DeviceAllocation, position: int, event: GpuEvent) -> DeviceHolder:
    """Return who holds the allocation at this position of the event."""
    uids = event.holder_uids or ()
    uid = uids[position] if position < len(uids) else None
    # A name alone proves nothing: the node may be anybody.
    if uid is None:
        return _UNKNOWN_HOLDER
    return DeviceHolder(HolderState.KNOWN, uid, held.namespace, held.pod, held.container)


class Place(Protocol):
    """Where an event lies."""

    @property
    def partition(self) -> int:
        """The partition of the topic."""

    @property
    def offset(self) -> int:
        """The offset in the partition."""


class Origin(NamedTuple):
    """Where an event was read, and when."""

    place: Place | None
    """Where it lies, where that is asked for."""
    ingested_time_ns: int
    """When it was read, by the reader's clock, nanoseconds since the epoch."""


class BookedEntry(NamedTuple):
    """One entry, with all that the event says of it."""

    event: GpuEvent
    """The event."""
    origin: Origin | None
    """Where and when the event was read, where that is asked for."""
    row: int
    """The entry's number within the event, from 0."""
    entry: Entry
    """The entry."""
    time_ns: int
    """End of the time that it is about, nanoseconds since the epoch."""
    interval_ns: int
    """Length of that time: the tick's, or of all ticks that are settled."""
    books: GpuBooks
    """The GPU's books in the event's tick."""
    gpu: GpuReading
    """Its readings."""
    busy_method: BusyMethod | None
    """How the busy time was found, as the device's books or the settlement say."""
    memory_method: MemoryMethod | None
    """How the memory was found."""
    energy_method: EnergyMethod | None
    """How the energy was found."""
    owner: EntryOwner
    """On whom it is booked."""
    holder: DeviceHolder
    """On idle: who held it unused."""
    apportioned: Amounts
    """What it has of the quantities that are apportioned."""


def booked_entries(event: GpuEvent, origin: Origin | None = None) -> Iterator[BookedEntry]:
    """Yield the entries of each GPU of the event, then those of each settlement.

    Raises ValueError where an entry names a container or a holder that the event does not list, or
    a settlement a GPU.
    """
    pods = PodIndex(event)
    row = count()
    for books in event.gpus:
        amounts = apportion(books, event.interval_ns)
        for entry, apportioned in zip(books.entries, amounts, strict=True):
            yield BookedEntry(
                event,
                origin,
                next(row),
                entry,
                event.time_ns,
                event.interval_ns,
                books,
                books.reading,
                books.busy_method,
                books.memory_method,
                books.energy_method,
                pods.owner_of(entry),
                holder_of(entry, event),
                apportioned,
            )
    for settlement in event.settlements or ():
        length_ns = max(0, settlement.until_time_ns - settlement.from_time_ns)
        books = gpu_of(settlement, event)
        for entry in settlement.entries:
            yield BookedEntry(
                event,
                origin,
                next(row),
                entry,
                settlement.until_time_ns,
                length_ns,
                books,
                books.reading,
                settlement.busy_method,
                None,
                None,
                pods.owner_of(entry),
                holder_of(entry, event),
                # The chip's counters of the ticks that are settled were split by what was known
                # then.
                UNKNOWN,
            )


def gpu_of(settlement: Settlement, event: GpuEvent) -> GpuBooks:
    """Return the GPU on which something is settled.

    Raises ValueError where the settlement names a position that the event's GPUs do not have.
    """
    return _at("gpu", settlement.gpu, event.gpus)


def _at(name: str, position: int, table: Sequence[T]) -> T:
    if position >= len(table):
        raise ValueError(
            f"{name}: position {position} is not one of the event's {name}s, "
            f"of which there are {len(table)}"
        )
    return table[position]
