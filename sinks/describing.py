"""Find the pod on whom an entry is booked, among the descriptions of its event.

Here lives that one look-up, for sinks that write a pod's names. Pure.
"""

from collections.abc import Iterable

from gpuledger.records import Entry, PodDescription


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
