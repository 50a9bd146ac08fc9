"""Find the pod on whom an entry is booked, or who held what it says was idle, in its event.

Here live these look-ups, for sinks that write names. Pure.
"""

from collections.abc import Iterable, Sequence

from gpuledger.records import DeviceAllocation, Entry, PodDescription


class PodIndex:
    """The pod descriptions of one event, by UID and by container."""

    def __init__(self, pods: Iterable[PodDescription]) -> None:
        self._by_uid: dict[str, PodDescription] = {}
        self._by_container: dict[str, PodDescription] = {}
        for pod in pods:
            if pod.uid is not None:
                self._by_uid[pod.uid] = pod
            for container_id in pod.container_ids:
                self._by_container[container_id] = pod

    def pod_of(self, entry: Entry) -> PodDescription | None:
        """Give the description of the entry's pod; `None` on other accounts than a pod's."""
        if entry.container_id is not None and entry.container_id in self._by_container:
            return self._by_container[entry.container_id]
        return self._by_uid.get(entry.pod_uid) if entry.pod_uid is not None else None


def container_name(pod: PodDescription | None, entry: Entry) -> str | None:
    """Give the name of the entry's container, where the pod's record names it."""
    if pod is None or pod.container_names is None or entry.container_id is None:
        return None
    return pod.container_names.get(entry.container_id)


def holder_of(entry: Entry, allocations: Sequence[DeviceAllocation]) -> DeviceAllocation | None:
    """Give who held the part of the GPU that the entry says was idle; `None` where nobody did.

    Raises ValueError where the entry names a position that the event's allocations do not have.
    """
    position = entry.allocation
    if position is None:
        return None
    if position >= len(allocations):
        raise ValueError(
            f"allocation: position {position} is not one of the event's allocations, "
            f"of which there are {len(allocations)}"
        )
    return allocations[position]
