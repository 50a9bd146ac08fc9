"""Says who the pods of an event are, by the pod cache.

Here lives the description's part of an event and of an attributed incident. Books live elsewhere
and do not change with what is known here. A node speaks for the pods that the API server has placed
on it: names come only from their records, and of another node's pod nothing is told but what the
node said of it. A pod is described by the version of it that was in force
at the tick's time, as far as it was read: a tick that comes late, or is joined again, is described
as it would have been in time. Its deletion shows on ticks after it only.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from enricher.join.pods.pods import ClusterPods, KnownPod, PodCache, nearest
from gpuledger.codec import encode
from gpuledger.keys import node_key
from gpuledger.ledger.holders import DeviceKey, device_of, devices_named_by
from gpuledger.recent import Budget, Recent
from gpuledger.records import (
    ContainerRef,
    DeviceAllocation,
    Incident,
    IncidentProcess,
    NodeSample,
    PodDescription,
    PodRecord,
    PodState,
)

MAX_DESCRIPTIONS_BYTES: Final = 128 * 2**20
"""What is remembered of what was said, of all nodes together: some 6 kB of each node that has eight
pods on its GPUs, so that it is enough for 20,000 of them."""
_CONTAINER_BYTES: Final = 250
_ALLOCATION_BYTES: Final = 850
"""Bytes of a container and of an allocation in memory, beside their texts."""
_EVER_NS: Final = 2**63
Identity = tuple[str | None, str | None]
_HOST: Final[Identity] = (None, None)
PodName = tuple[str, str]
"""The namespace and the name of a pod."""
_NO_NAME: Final[PodName] = ("", "")


_NOTHING: Final[Mapping[Identity, PodName]] = MappingProxyType({})


class Holders(NamedTuple):
    """Who holds the allocations of a tick, as far as it is known."""

    uids: Sequence[str | None]
    """For each allocation the UID of the pod; `None` where no record of this node has the name."""
    unknown: int
    """How many pods there are of which none has."""
    changes_ns: Sequence[int]
    """When a name passes from one pod to the next."""


_NOBODY = Holders((), 0, ())


def find_named_holders(sample: NodeSample, pods: PodCache) -> Holders:
    """Return the holders of a tick's allocations by the pods of its node, at the tick's time.

    The kubelet's response names pods and has no UIDs. A name counts only where a pod record of this
    very node has it: otherwise a node could put what is idle there on any pod.
    """
    if not sample.allocations:
        return _NOBODY
    named = pods.named_on(sample.node)
    found: dict[tuple[str, str], str | None] = {}
    changes: list[int] = []
    for each in sample.allocations:
        name = (each.namespace, each.pod)
        if name in found:
            continue
        candidates = named.get(name, ())
        pod = nearest(candidates, time_ns=sample.time_ns)
        found[name] = None if pod is None else pod.record.uid
        if len(candidates) > 1:
            for candidate in candidates:
                changes += [candidate.record.created_time_ns, *candidate.changes_ns()]
    uids = [found[each.namespace, each.pod] for each in sample.allocations]
    return Holders(uids, sum(uid is None for uid in found.values()), changes)


def name_by_allocation(
    sample: NodeSample, pending: Collection[Identity], pods: PodCache
) -> dict[Identity, PodName]:
    """Return the names that the tick's allocations tell of containers without a pod record.

    A cgroup has UIDs and the kubelet's answer names, and only their device is the same: so that a
    name is told where one pod alone holds each device on which the container's processes are, where
    no other container without a record is there that could be meant, and where no record of a pod
    of that name is known that still lives, on this node, so that it would be that pod, or on
    another.
    """
    if not pending or not sample.allocations:
        return {}
    waiting = set(pending)
    holders: dict[DeviceKey, set[PodName]] = {}
    for each in sample.allocations:
        holders.setdefault(device_of(each), set()).add((each.namespace, each.pod))
    # For each pod that is pending, by its UID or by its container: who may hold what it is on.
    meant: dict[str, set[PodName]] = {}
    identities = list(map(identity_of, sample.containers))
    for process in sample.processes:
        if process.container is None or process.container >= len(identities):
            continue
        identity = identities[process.container]
        if identity in waiting and process.gpu < len(sample.gpus):
            devices = devices_named_by(sample.gpus[process.gpu])
            there = set().union(*(holders.get(device, ()) for device in devices))
            # More than one, or none, is written as what no pod can be called.
            name = there.pop() if len(there) == 1 else _NO_NAME
            meant.setdefault(identity[0] or identity[1] or "", set()).add(name)
    claimed = Counter(name for names in meant.values() for name in names)
    here = pods.named_on(sample.node)
    told: dict[str, PodName] = {}
    for pod, names in meant.items():
        (name,) = names if len(names) == 1 else (_NO_NAME,)
        if name == _NO_NAME or claimed[name] > 1:
            continue
        time_ns = sample.time_ns
        lives_here = any(not known.is_gone(time_ns) for known in here.get(name, ()))
        if not lives_here and not pods.is_placed_elsewhere(
            *name, node=sample.node, time_ns=time_ns
        ):
            told[pod] = name
    return {
        identity: told[pod]
        for identity in pending
        if (pod := identity[0] or identity[1] or "") in told
    }


class PodDescriptions(NamedTuple):
    """What was said of a node's pods, and what it was said of."""

    version: int
    """The version of the node's pods at that time."""
    from_ns: int
    """From which event time on it holds."""
    until_ns: int
    """Up to which event time."""
    containers: list[ContainerRef]
    """The containers that were described."""
    allocations: list[DeviceAllocation]
    """The allocations whose holders were looked up."""
    pods: msgspec.Raw
    """The descriptions, encoded: from tick to tick they are the same bytes."""
    holder_uids: msgspec.Raw | None
    """The holders' UIDs, encoded; `None` without allocations."""
    unknown_holders: int
    """How many pods are said to hold something of which no record of this node is known."""
    pending: Collection[Identity]
    """Those of them that lack the pod's record."""
    named: int
    """How many of those have a name by the tick's allocations."""
    foreign: Collection[PodRecord]
    """The pods among them that the API server has placed on another node."""


class DescriptionCache:
    """Remembers what was said of a node's pods until one of them, or who is there, changes.

    From tick to tick the same containers are on a node's GPUs; saying anew who they are would be a
    third of the join's work. Memory is bounded by `max_bytes`: beyond, what was said of the nodes
    goes that were heard of longest ago, as of those whose names somebody makes up.
    """

    def __init__(self, pods: ClusterPods, *, max_bytes: int = MAX_DESCRIPTIONS_BYTES) -> None:
        self._pods = pods
        self._known: Recent[str, PodDescriptions] = Recent(
            budget=Budget(max_bytes=max_bytes), size_bytes=_size_bytes
        )

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget everything: after a partition was given up, only its own nodes are asked again."""
        self._known.clear()

    def forget(self, node: str) -> None:
        """Forget what was said of the node of a key."""
        self._known.pop(node)

    def describe(self, sample: NodeSample) -> PodDescriptions:
        """Describe the pods of a tick's containers."""
        node, pods = node_key(sample), self._pods.of(sample.cluster)
        descriptions = self._known.get(node)
        if (
            descriptions is None
            or descriptions.version != pods.version_of(sample.node)
            or not descriptions.from_ns <= sample.time_ns < descriptions.until_ns
            or descriptions.containers != sample.containers
            or descriptions.allocations != sample.allocations
        ):
            descriptions = _describe(sample, pods)
            # What becomes of another node's pod does not show in ours; nor on which GPUs processes
            # are, by which those without a record may have a name.
            if not descriptions.foreign and not (descriptions.pending and sample.allocations):
                self._known[node] = descriptions
        return descriptions


def _describe(sample: NodeSample, pods: PodCache) -> PodDescriptions:
    identities = list(map(identity_of, sample.containers))
    found = [pods.find(*identity, node=sample.node) for identity in identities]
    foreign = find_foreign_pods(identities, pods, node=sample.node)
    pending = [
        identity
        for identity, pod in zip(identities, found, strict=True)
        if pod is None and identity != _HOST and identity not in foreign
    ]
    named = name_by_allocation(sample, pending, pods)
    described = describe_pods(
        identities, pods, node=sample.node, time_ns=sample.time_ns, named=named
    )
    holders = find_named_holders(sample, pods)
    changes = [time for pod in found if pod for time in pod.changes_ns()]
    changes += holders.changes_ns
    return PodDescriptions(
        version=pods.version_of(sample.node),
        from_ns=max((at for at in changes if at <= sample.time_ns), default=0),
        until_ns=min(
            (time_ns for time_ns in changes if time_ns > sample.time_ns), default=_EVER_NS
        ),
        containers=sample.containers,
        allocations=sample.allocations,
        pods=msgspec.Raw(encode(described)),
        holder_uids=msgspec.Raw(encode(holders.uids)) if holders.uids else None,
        unknown_holders=holders.unknown,
        pending=pending,
        named=len(named),
        # Several containers of one pod lead to it; it is counted and logged once.
        foreign=list({pod.uid: pod for pod in foreign.values()}.values()),
    )


def _size_bytes(descriptions: PodDescriptions) -> int:
    """Return about how much memory it takes."""
    texts = sum(
        len(container.container_id or "") + len(container.pod_uid or "")
        for container in descriptions.containers
    )
    texts += sum(
        len(allocation.gpu_uuid)
        + len(allocation.device_id)
        + len(allocation.resource_name)
        + len(allocation.namespace)
        + len(allocation.pod)
        + len(allocation.container)
        + len(allocation.replica or "")
        + len(allocation.claim or "")
        for allocation in descriptions.allocations
    )
    rows = _CONTAINER_BYTES * len(descriptions.containers) + _ALLOCATION_BYTES * len(
        descriptions.allocations
    )
    return rows + 2 * texts + len(memoryview(descriptions.pods))


def identity_of(container: ContainerRef | IncidentProcess) -> Identity:
    """Return the pair by which the pod of a container is found."""
    return container.pod_uid, container.container_id


def find_foreign_pods(
    identities: Iterable[Identity], pods: PodCache, *, node: str
) -> dict[Identity, PodRecord]:
    """Return the pods among these that the API server has placed on another node.

    A pod never moves: its record names its node for good. One whose record this worker has not read
    is no foreign one but pending, and so is every pod of partitions that other workers hold. A node
    that was registered anew under another name is another node: what it still runs of the old one's
    pods is foreign, until that has ended.
    """
    found = {identity: pods.find_pod_of_other_node(*identity, node=node) for identity in identities}
    return {identity: pod for identity, pod in found.items() if pod is not None}


def describe_pods(
    identities: Iterable[Identity],
    pods: PodCache,
    *,
    node: str,
    time_ns: int,
    named: Mapping[Identity, PodName] = _NOTHING,
) -> list[PodDescription]:
    """Describe each pod once, in an order that depends on the identities alone.

    `named` has the names that are known without a pod's record.
    """
    containers: dict[str, list[str]] = {}
    found: dict[str, KnownPod] = {}
    nameless: list[PodDescription] = []
    wanted = sorted(
        set(identities) - {_HOST}, key=lambda identity: (identity[0] or "", identity[1] or "")
    )
    foreign = find_foreign_pods(wanted, pods, node=node)
    foreign_uids = {uid for uid, _ in foreign}
    name_of = {uid: name for (uid, _), name in named.items()}
    for uid, container_id in wanted:
        pod = pods.find(uid, container_id, node=node)
        key = pod.record.uid if pod else uid
        ids = [container_id] if container_id else []
        if key is None:
            nameless.append(
                _by_the_node(
                    None,
                    ids,
                    is_foreign=(uid, container_id) in foreign,
                    name=named.get((uid, container_id)),
                )
            )
            continue
        if pod:
            found[key] = pod
        containers.setdefault(key, []).extend(ids)
    known = [
        describe_known(found[uid], ids, time_ns=time_ns)
        if uid in found
        else _by_the_node(uid, ids, is_foreign=uid in foreign_uids, name=name_of.get(uid))
        for uid, ids in containers.items()
    ]
    return known + nameless


def _by_the_node(
    uid: str | None, container_ids: list[str], *, is_foreign: bool, name: PodName | None
) -> PodDescription:
    """Describe a pod by what the node said of it alone."""
    if name is not None:
        return PodDescription(
            uid=uid,
            container_ids=container_ids,
            state=PodState.NAMED,
            namespace=name[0],
            name=name[1],
        )
    state = PodState.FOREIGN if is_foreign else PodState.PENDING
    return PodDescription(uid=uid, container_ids=container_ids, state=state)


def describe_known(known: KnownPod, container_ids: list[str], *, time_ns: int) -> PodDescription:
    """Describe a pod by the version of it that was in force at a time."""
    pod, said, deleted_ns = known.record, known.at(time_ns), known.record.deleted_time_ns
    return PodDescription(
        uid=pod.uid,
        container_ids=container_ids,
        state=PodState.KNOWN,
        namespace=pod.namespace,
        name=pod.name,
        owner_kind=said.owner_kind,
        owner_name=said.owner_name,
        labels=said.labels,
        container_names=known.container_names(container_ids),
        deleted_time_ns=deleted_ns if deleted_ns is None or deleted_ns <= time_ns else None,
    )


def describe_incident(incident: Incident, pods: PodCache) -> list[PodDescription]:
    """Describe each pod once: those of the processes, then holders in the kubelet's order.

    Holders have the names that the kubelet gave, whose response has no UIDs. They are looked up
    among the node's own pods alone, as are the pods of processes, so that no node speaks for
    another one's.
    """
    node, time_ns = incident.node, incident.time_ns
    found = describe_pods(map(identity_of, incident.processes), pods, node=node, time_ns=time_ns)
    there = {pod.uid for pod in found if pod.uid}
    held: dict[tuple[str, str], set[str]] = {}
    for each in incident.allocations or ():
        held.setdefault((each.namespace, each.pod), set()).add(each.container)
    named = pods.named_on(node) if held else {}
    for name, containers in held.items():
        known = nearest(named.get(name, ()), time_ns=time_ns)
        if known is None:
            # The incident keeps the name that the node gave; here it would alert that pod's owner.
            found.append(PodDescription(uid=None, container_ids=[], state=PodState.PENDING))
            continue
        ids = [
            each.container_id
            for each in known.record.containers
            if each.container_id is not None and each.name in containers
        ]
        description = describe_known(known, ids, time_ns=time_ns)
        if description.uid not in there:
            found.append(description)
    return found
