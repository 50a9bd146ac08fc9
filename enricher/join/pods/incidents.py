"""Says who the pods of an incident are: those with processes on the GPU, and those that hold it.

Holders have the names that the kubelet gave, whose answer has no UIDs. They are looked up among the
node's own pods alone, as are the pods of processes, so that no node speaks for another one's.
"""

from collections.abc import Iterable

from enricher.join.pods.describe import describe_known, describe_pods, identity_of
from enricher.join.pods.pods import KnownPod, PodCache, nearest
from gpuledger.records import DeviceAllocation, Incident, PodDescription, PodState


def describe_incident(incident: Incident, pods: PodCache) -> list[PodDescription]:
    """Describe each pod once: those of the processes, then holders in the kubelet's order."""
    found = describe_pods(
        map(identity_of, incident.processes),
        pods,
        node=incident.node,
        time_ns=incident.time_ns,
    )
    there = {pod.uid for pod in found if pod.uid}
    held = _describe_holders(
        incident.allocations or (), pods, node=incident.node, time_ns=incident.time_ns
    )
    return found + [pod for pod in held if pod.uid not in there]


def _describe_holders(
    allocations: Iterable[DeviceAllocation], pods: PodCache, *, node: str, time_ns: int
) -> list[PodDescription]:
    containers: dict[tuple[str, str], set[str]] = {}
    for each in allocations:
        containers.setdefault((each.namespace, each.pod), set()).add(each.container)
    named = pods.named_on(node) if containers else {}
    return [
        _describe(nearest(named.get(name, ()), time_ns=time_ns), held, time_ns=time_ns)
        for name, held in containers.items()
    ]


def _describe(known: KnownPod | None, containers: set[str], *, time_ns: int) -> PodDescription:
    if known is None:
        # The incident keeps the name that the node gave; here it would alert that pod's owner.
        return PodDescription(uid=None, container_ids=[], state=PodState.PENDING)
    ids = [
        each.container_id
        for each in known.record.containers
        if each.container_id is not None and each.name in containers
    ]
    return describe_known(known, ids, time_ns=time_ns)
