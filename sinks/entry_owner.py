"""Find the pod on whom an entry is booked, or who held what it says was idle, in its event.

Here live these look-ups, for sinks that write names. Pure.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from gpuledger.records import (
    ContainerRef,
    DeviceAllocation,
    Entry,
    GpuBooks,
    GpuEvent,
    HolderState,
    PodDescription,
    Settlement,
)


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


_NO_POD: Final = EntryOwner()
T = TypeVar("T")


class EntryOwners:
    """The pods and containers of one event."""

    def __init__(self, event: GpuEvent) -> None:
        self._containers = event.containers
        self._found: dict[int, EntryOwner] = {}
        self._by_uid = {pod.uid: pod for pod in event.pods if pod.uid is not None}
        self._by_container = {each: pod for pod in event.pods for each in pod.container_ids}

    def of(self, entry: Entry) -> EntryOwner:
        """Return on whom the entry is booked.

        Raises ValueError where the entry names a position that the event's containers do not have.
        """
        position = entry.container
        if position is None:
            return _NO_POD
        found = self._found.get(position)
        if found is None:
            ref: ContainerRef = _at("container", position, self._containers)
            found = self._found[position] = self._look_up(ref)
        return found

    def _look_up(self, ref: ContainerRef) -> EntryOwner:
        pod = self._by_container.get(ref.container_id or "") or self._by_uid.get(ref.pod_uid or "")
        if pod is None:
            return EntryOwner(None, ref.pod_uid, ref.container_id)
        name = (pod.container_names or {}).get(ref.container_id or "")
        return EntryOwner(pod, ref.pod_uid or pod.uid, ref.container_id, name)


class DeviceHolder(NamedTuple):
    """Who held a part of a GPU that nobody used; without names where the node's word is all."""

    state: HolderState
    """Whether a pod of the event's node is known to have the name that the node gave."""
    uid: str | None = None
    """The pod's UID."""
    namespace: str | None = None
    """The pod's namespace."""
    pod: str | None = None
    """The pod's name."""
    container: str | None = None
    """The container's name."""


_UNKNOWN_HOLDER: Final = DeviceHolder(HolderState.UNKNOWN)


def holder_of(entry: Entry, event: GpuEvent) -> DeviceHolder | None:
    """Return who held the part of the GPU that the entry says was idle; `None` where nobody did.

    Raises ValueError where the entry names a position that the event's allocations do not have.
    """
    position = entry.allocation
    if position is None:
        return None
    return name_holder(_at("allocation", position, event.allocations), position, event)


def name_holder(held: DeviceAllocation, position: int, event: GpuEvent) -> DeviceHolder:
    """Return who holds the allocation at this position of the event."""
    uids = event.holder_uids or ()
    uid = uids[position] if position < len(uids) else None
    if uid is None:
        return _UNKNOWN_HOLDER
    return DeviceHolder(HolderState.KNOWN, uid, held.namespace, held.pod, held.container)


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
