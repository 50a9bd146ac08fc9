"""The pod on which an entry is booked, for tests that sum by pod."""

from gpuledger.records import Entry, GpuEvent, NodeSample


def pod_of(entry: Entry, tick: NodeSample | GpuEvent) -> str | None:
    """Return the UID of the pod; `None` if the entry is not booked on a pod."""
    if entry.container is None:
        return None
    if isinstance(tick, NodeSample):
        return tick.containers[entry.container].pod_uid
    pod = tick.containers[entry.container].pod
    return None if pod is None else tick.pods[pod].uid
