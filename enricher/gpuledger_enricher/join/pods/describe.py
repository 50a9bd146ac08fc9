"""Describes an event's pods, from the pod cache.

This module makes the descriptive part of events and attributed incidents: the pods, their
namespaces and the node. It does not affect the books. A node may report only pods that the API
server has placed on this node. Names come from the records of the node's own pods. A pod of another
node is described only by the contents of the tick.

Each object is described by the version that was in force at the tick's time, if that version was
read. So a tick that is late or joined again gets the same description as a tick in time. The
deletion of a pod shows only in ticks after the deletion.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from gpuledger.codec import encode
from gpuledger.keys import key_in, node_key
from gpuledger.ledger.allocated_parts import (
    AllocatedContainer,
    DeviceKey,
    allocated_containers,
    device_of,
    devices_named_by,
)
from gpuledger.recent import Budget, Recent
from gpuledger.records import (
    AttributedIncident,
    ContainerRef,
    DeviceAllocation,
    EventAllocation,
    EventContainer,
    Incident,
    IncidentProcess,
    NamespaceDescription,
    NodeDescription,
    NodeSample,
    PodDescription,
    PodRecord,
    PodState,
)
from gpuledger.records.bounds import MAX_NAMESPACES_BYTES
from gpuledger_enricher.join.pods.pods import (
    ClusterObjects,
    ClusterPods,
    KnownPod,
    PodCache,
    nearest,
)

MAX_DESCRIPTIONS_BYTES: Final = 128 * 2**20
"""Memory for remembered descriptions of all nodes: at 6 kB for a node with eight pods on its GPUs,
enough for 20,000 nodes."""
_CONTAINER_BYTES: Final = 250
_ALLOCATION_BYTES: Final = 850
"""Bytes of a container and of an allocation in memory, without their strings."""
_NAMESPACE_BYTES: Final = 330
"""Bytes of memory per remembered namespace: a tuple, its key of up to 130 characters, and a number.
"""
_EVER_NS: Final = 2**63
Identity = tuple[str | None, str | None]
_HOST: Final[Identity] = (None, None)
PodName = tuple[str, str]
"""A pod's namespace and name."""
_NO_NAME: Final[PodName] = ("", "")


_NOTHING: Final[Mapping[Identity, PodName]] = MappingProxyType({})


def name_by_allocation(
    sample: NodeSample, pending: Collection[Identity], pods: PodCache
) -> dict[Identity, PodName]:
    """Return the names of pods without a record, if the tick's allocations identify them.

    A cgroup path has UIDs and the kubelet's response has names: only the device connects the two. A
    pending pod gets the name of a pod in the kubelet's response if all of these are true:

    - Each device that the pending pod's processes use is allocated only to the pod of this name.
    - No other pending pod could have this name.
    - No living pod of this name is known, neither on this node nor on another one.
    """
    if not pending or not sample.allocations:
        return {}
    waiting = set(pending)
    allocatees: dict[DeviceKey, set[PodName]] = {}
    for allocation in sample.allocations:
        allocatees.setdefault(device_of(allocation), set()).add(
            (allocation.namespace, allocation.pod)
        )
    # Possible names of each pending pod, from the allocations of its devices; by UID or container
    # id.
    meant: dict[str, set[PodName]] = {}
    identities = list(map(identity_of, sample.containers))
    for process in sample.processes:
        if process.container is None or process.container >= len(identities):
            continue
        identity = identities[process.container]
        if identity in waiting and process.gpu < len(sample.gpus):
            devices = devices_named_by(sample.gpus[process.gpu])
            there = set().union(*(allocatees.get(device, ()) for device in devices))
            # `_NO_NAME`, which is never the name of a pod, marks a device that is allocated to no
            # pod or several.
            name = there.pop() if len(there) == 1 else _NO_NAME
            meant.setdefault(identity[0] or identity[1] or "", set()).add(name)
    claimed = Counter(name for names in meant.values() for name in names)
    here = pods.named_on(sample.node)
    name_of: dict[str, PodName] = {}
    for pod, names in meant.items():
        (name,) = names if len(names) == 1 else (_NO_NAME,)
        if name == _NO_NAME or claimed[name] > 1:
            continue
        time_ns = sample.time_ns
        lives_here = any(not known.is_gone(time_ns) for known in here.get(name, ()))
        if not lives_here and not pods.is_placed_elsewhere(
            *name, node=sample.node, time_ns=time_ns
        ):
            name_of[pod] = name
    return {
        identity: name_of[pod]
        for identity in pending
        if (pod := identity[0] or identity[1] or "") in name_of
    }


class EncodedDescriptions(NamedTuple):
    """The encoded description fields of an event."""

    pods: msgspec.Raw
    """The pods, without duplicates."""
    containers: msgspec.Raw
    """The containers on which entries are booked."""
    allocations: msgspec.Raw
    """The containers to which GPUs are allocated."""
    namespaces: msgspec.Raw | None
    """The pods' namespaces; `None` if none is known."""
    node_description: msgspec.Raw | None
    """The node; `None` if it is unknown."""


class PodDescriptions(NamedTuple):
    """The descriptions of a node's pods, and the inputs that they were made from."""

    version: int
    """The result of `PodCache.version_of` for the node when its pods were described."""
    from_ns: int
    """First event time for which the description is valid."""
    until_ns: int
    """Event time at which the description stops being valid."""
    containers: list[ContainerRef]
    """The tick's containers."""
    allocations: list[DeviceAllocation]
    """The tick's allocations."""
    encoded: EncodedDescriptions
    """The encoded description for the event, with the same bytes from tick to tick."""
    foreign_allocatees: int
    """Number of pods on other nodes to which, by the tick, devices of this node are allocated."""
    users: Collection[str]
    """UIDs of the containers' known pods, each once."""
    pending: Collection[Identity]
    """Containers whose pods have no record yet."""
    named: int
    """Number of pods whose names come only from the tick's allocations."""
    foreign: Collection[PodRecord]
    """Records of the containers' pods that the API server has placed on another node."""
    node_version: int
    """The result of `NamedObjects.version_of` for the node."""
    namespaces: Sequence[tuple[str, int]]
    """The key of each namespace of the pods, with the result of `NamedObjects.version_of`."""
    namespaces_left_out: int
    """Number of known namespaces that are left out because an event has no room for them."""


class DescriptionCache:
    """Caches the descriptions of each node until an object in them changes.

    A node usually has the same containers on its GPUs from tick to tick; describing them each time
    would take a third of the join's work. Memory is limited to `max_bytes`: beyond this limit, the
    cache drops the nodes that were described longest ago, for instance nodes with forged names.
    """

    def __init__(
        self,
        pods: ClusterPods,
        cluster_objects: ClusterObjects | None = None,
        *,
        max_bytes: int = MAX_DESCRIPTIONS_BYTES,
    ) -> None:
        self._pods = pods
        self._cluster_objects = cluster_objects or ClusterObjects()
        self._known: Recent[str, PodDescriptions] = Recent(
            budget=Budget(max_bytes=max_bytes), size_bytes=_size_bytes
        )

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget all descriptions; each node is described again at its next tick."""
        self._known.clear()

    def forget(self, node: str) -> None:
        """Forget a node's descriptions, by the node's key."""
        self._known.pop(node)

    def describe(self, sample: NodeSample) -> PodDescriptions:
        """Return the descriptions for a tick, from the cache if they are valid for it."""
        node, pods = node_key(sample), self._pods.of(sample.cluster)
        descriptions = self._known.get(node)
        if (
            descriptions is None
            or descriptions.version != pods.version_of(sample.node)
            or not descriptions.from_ns <= sample.time_ns < descriptions.until_ns
            or descriptions.containers != sample.containers
            or descriptions.allocations != sample.allocations
            or descriptions.node_version != self._cluster_objects.nodes.version_of(node)
            or any(
                self._cluster_objects.namespaces.version_of(key) != version
                for key, version in descriptions.namespaces
            )
        ):
            descriptions = describe_tick(sample, pods, self._cluster_objects)
            # Two kinds are not cached. Some depend on pods of other nodes: a change of such a pod
            # does not change this node's version. Others depend on the GPUs that processes use, by
            # which a pod without a record is named.
            if not (
                descriptions.foreign
                or descriptions.foreign_allocatees
                or descriptions.named
                or (descriptions.pending and sample.allocations)
            ):
                self._known[node] = descriptions
        return descriptions


def describe_tick(
    sample: NodeSample, pods: PodCache, cluster_objects: ClusterObjects
) -> PodDescriptions:
    """Return the descriptions of a tick's pods, of their namespaces, and of the node.

    A tick's pods are those that use a GPU in the tick, or to which a GPU is allocated.
    """
    node, time_ns = sample.node, sample.time_ns
    identities = list(map(identity_of, sample.containers))
    found = [pods.find(*identity, node=node, time_ns=time_ns) for identity in identities]
    foreign = find_foreign_pods(identities, pods, node=node)
    pending = [
        identity
        for identity, pod in zip(identities, found, strict=True)
        if pod is None and identity != _HOST and identity not in foreign
    ]
    event_pods = EventPods(pods, node=node, time_ns=time_ns)
    event_pods.add_users(
        identities, named=name_by_allocation(sample, pending, pods), foreign=foreign
    )
    allocations = event_pods.add_allocations(sample.allocations)
    containers = [
        EventContainer(
            container_id=container.container_id,
            pod=event_pods.position_of(identity),
            name=event_pods.container_name(identity),
        )
        for container, identity in zip(sample.containers, identities, strict=True)
    ]
    descriptions, key = event_pods.descriptions(), node_key(sample)
    names = sorted({pod.namespace for pod in descriptions if pod.namespace is not None})
    namespaces = [key_in(sample.cluster, name) for name in names]
    changes_ns = event_pods.changes_ns + cluster_objects.nodes.changes_ns(key)
    for namespace in namespaces:
        changes_ns += cluster_objects.namespaces.changes_ns(namespace)
    at_time = (cluster_objects.namespaces.at(namespace, time_ns) for namespace in namespaces)
    known = [version for version in at_time if version is not None]
    described = _fitting(known)
    node_description = cluster_objects.nodes.at(key, time_ns)
    return PodDescriptions(
        version=pods.version_of(node),
        from_ns=max((at for at in changes_ns if at <= time_ns), default=0),
        until_ns=min((at for at in changes_ns if at > time_ns), default=_EVER_NS),
        containers=sample.containers,
        allocations=sample.allocations,
        encoded=EncodedDescriptions(
            pods=msgspec.Raw(encode(descriptions)),
            containers=msgspec.Raw(encode(containers)),
            allocations=msgspec.Raw(encode(allocations)),
            namespaces=msgspec.Raw(encode(described)) if described else None,
            node_description=None
            if node_description in (None, NodeDescription())
            else msgspec.Raw(encode(node_description)),
        ),
        foreign_allocatees=event_pods.foreign_allocatees,
        users=tuple({pod.record.uid for pod in found if pod is not None}),
        pending=pending,
        named=event_pods.named,
        # Several containers may belong to one pod; the pod is counted and logged once.
        foreign=list({pod.uid: pod for pod in foreign.values()}.values()),
        node_version=cluster_objects.nodes.version_of(key),
        namespaces=[
            (namespace, cluster_objects.namespaces.version_of(namespace))
            for namespace in namespaces
        ],
        namespaces_left_out=len(known) - len(described),
    )


def _fitting(namespaces: Sequence[NamespaceDescription]) -> list[NamespaceDescription]:
    """Return the first namespaces, as many as fit into an event."""
    fitting, size_bytes = [], 0
    for namespace in namespaces:
        size_bytes += len(encode(namespace))
        if size_bytes > MAX_NAMESPACES_BYTES:
            break
        fitting.append(namespace)
    return fitting


def _size_bytes(descriptions: PodDescriptions) -> int:
    """Return the approximate size of the descriptions in memory, in bytes."""
    texts = sum(
        len(container.container_id or "")
        + len(container.pod_uid or "")
        + len(container.job_id or "")
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
    rows += _NAMESPACE_BYTES * len(descriptions.namespaces)
    encoded = (field for field in descriptions.encoded if field is not None)
    return rows + 2 * texts + sum(len(memoryview(field)) for field in encoded)


def identity_of(container: ContainerRef | IncidentProcess) -> Identity:
    """Return the UID and the container id that identify a pod; `None` and `None` for a job."""
    if container.pod_uid is None and container.job_id is not None:
        return _HOST
    return container.pod_uid, container.container_id


def find_foreign_pods(
    identities: Iterable[Identity], pods: PodCache, *, node: str
) -> dict[Identity, PodRecord]:
    """Return the pods with these identities that the API server has placed on another node.

    A pod never moves, so its record names its node permanently. A pod without a record in this
    worker is pending, not foreign; this includes every pod in the partitions of other workers. A
    node that is registered again under another name is a different node: pods of the old node that
    still run there are foreign until they end.
    """
    found = {identity: pods.find_pod_of_other_node(*identity, node=node) for identity in identities}
    return {identity: pod for identity, pod in found.items() if pod is not None}


class _NamelessPod(NamedTuple):
    """A pod of an event for which no record on the event's node is known."""

    uid: str | None
    state: PodState
    name: PodName | None = None


class EventPods:
    """The pods of one event; each is listed once, and other fields refer to it by its position.

    Pods that use GPUs come first, in an order that depends only on their identities. Pods to which
    devices are only allocated follow, by name.
    """

    def __init__(self, pods: PodCache, *, node: str, time_ns: int) -> None:
        self._pods = pods
        self._node = node
        self._time_ns = time_ns
        self._listed: list[KnownPod | _NamelessPod] = []
        self._containers: list[set[str]] = []
        """For each pod, the names of its containers in the event."""
        self._positions: dict[str | PodName, int] = {}
        """Position of each pod, by its UID, or by a container id if the UID is unknown. A pod that
        was found by an allocation also has its position by name."""
        self._users: dict[Identity, int] = {}
        self._named_here: Mapping[PodName, Sequence[KnownPod]] | None = None
        self.changes_ns: list[int] = []
        """Times at which a description changes, or at which a name passes to another pod."""
        self.foreign_allocatees = 0
        """Number of pods on other nodes to which, by the tick, devices of this node are allocated.
        """

    @property
    def named(self) -> int:
        """Number of pods whose names come only from the tick's allocations."""
        return sum(
            isinstance(pod, _NamelessPod) and pod.state is PodState.NAMED for pod in self._listed
        )

    def add_users(
        self,
        identities: Iterable[Identity],
        *,
        foreign: Collection[Identity],
        named: Mapping[Identity, PodName] = _NOTHING,
    ) -> None:
        """Add the pods of containers.

        `foreign` has the containers whose pods are placed on another node, and `named` has the
        names of pods without a record.
        """
        wanted = set(identities) - {_HOST}
        for identity in sorted(wanted, key=lambda identity: (identity[0] or "", identity[1] or "")):
            known = self._pods.find(*identity, node=self._node, time_ns=self._time_ns)
            self.changes_ns += self._pods.name_changes_ns(*identity, node=self._node)
            if known is not None:
                position = self._add_known(known)
                if name := known.container_name(identity[1]):
                    self._containers[position].add(name)
            else:
                position = self._add_nameless(
                    identity, is_foreign=identity in foreign, name=named.get(identity)
                )
            self._users[identity] = position

    def add_allocations(self, allocations: Sequence[DeviceAllocation]) -> list[EventAllocation]:
        """Add the pods of allocations; return the allocated containers, by pod.

        The kubelet's response has pod names but no UIDs. If this node has a pod record of that
        name, the record is used. If not, the node's report is trusted, but only if no pod of that
        name is placed on another node. Otherwise a node could charge its idle time to any pod.
        """
        if not allocations:
            return []
        resources: dict[AllocatedContainer, set[str]] = {}
        claims: dict[AllocatedContainer, set[str]] = {}
        for allocation in allocations:
            if allocation.admin_access:
                continue
            allocatee = AllocatedContainer(
                allocation.namespace, allocation.pod, allocation.container
            )
            resources.setdefault(allocatee, set()).add(allocation.resource_name)
            if allocation.claim is not None:
                claims.setdefault(allocatee, set()).add(allocation.claim)
        found = []
        for allocatee in allocated_containers(allocations):
            position = self.add_allocatee((allocatee.namespace, allocatee.pod))
            self._containers[position].add(allocatee.container)
            found.append(
                EventAllocation(
                    pod=position,
                    container=allocatee.container,
                    resources=sorted(resources[allocatee]),
                    claims=sorted(claims[allocatee]) if allocatee in claims else None,
                )
            )
        return found

    def add_allocatee(self, name: PodName) -> int:
        """Add the pod of this name, to which devices are allocated; return its position."""
        position = self._positions.get(name)
        if position is not None:
            return position
        if self._named_here is None:
            # Only once, because this call iterates over all pods of the node.
            self._named_here = self._pods.named_on(self._node)
        candidates = self._named_here.get(name, ())
        for candidate in candidates:
            self.changes_ns += candidate.holder_changes_ns()
            if len(candidates) > 1:
                self.changes_ns += [candidate.record.created_time_ns, *candidate.changes_ns()]
        known = nearest(candidates, time_ns=self._time_ns)
        # A pod that did not exist yet is not meant: the record of the right pod was not read yet.
        if known is not None and known.may_hold(self._time_ns):
            position = self._positions[name] = self._add_known(known)
            return position
        is_foreign = self._pods.is_placed_elsewhere(*name, node=self._node, time_ns=self._time_ns)
        self.foreign_allocatees += is_foreign
        state = PodState.FOREIGN if is_foreign else PodState.NAMED
        return self._add(name, _NamelessPod(None, state, None if is_foreign else name))

    def position_of(self, identity: Identity) -> int | None:
        """Return the position of a container's pod; `None` if the container has no pod."""
        return self._users.get(identity)

    def container_name(self, identity: Identity) -> str | None:
        """Return the name of a container; `None` if the record of its pod does not contain it."""
        position = self._users.get(identity)
        pod = None if position is None else self._listed[position]
        return pod.container_name(identity[1]) if isinstance(pod, KnownPod) else None

    def descriptions(self) -> list[PodDescription]:
        """Return the description of each pod, by position."""
        return [
            describe_known(pod, containers, time_ns=self._time_ns)
            if isinstance(pod, KnownPod)
            else _describe_nameless(pod)
            for pod, containers in zip(self._listed, self._containers, strict=True)
        ]

    def _add_known(self, known: KnownPod) -> int:
        uid = known.record.uid
        if uid in self._positions:
            return self._positions[uid]
        self.changes_ns += known.changes_ns()
        return self._add(uid, known)

    def _add_nameless(self, identity: Identity, *, is_foreign: bool, name: PodName | None) -> int:
        uid, container_id = identity
        key = uid or container_id or ""
        if key in self._positions:
            return self._positions[key]
        state = PodState.FOREIGN if is_foreign else PodState.NAMED if name else PodState.PENDING
        position = self._add(key, _NamelessPod(uid, state, name))
        if name is not None:
            self._positions[name] = position
        return position

    def _add(self, key: str | PodName, pod: KnownPod | _NamelessPod) -> int:
        position = self._positions[key] = len(self._listed)
        self._listed.append(pod)
        self._containers.append(set())
        return position


def _describe_nameless(pod: _NamelessPod) -> PodDescription:
    """Return a description with only the values that the node's tick contains."""
    namespace, name = pod.name or (None, None)
    return PodDescription(uid=pod.uid, state=pod.state, namespace=namespace, name=name)


def describe_known(known: KnownPod, containers: Collection[str], *, time_ns: int) -> PodDescription:
    """Return a pod's description at a time, from the version that was in force.

    `containers` has the names of the containers whose requests are included.
    """
    pod, facts, deleted_ns = known.record, known.at(time_ns), known.record.deleted_time_ns
    requested = {
        container.name: container.requested
        for container in pod.containers
        if container.requested is not None and container.name in containers
    }
    return PodDescription(
        uid=pod.uid,
        state=PodState.KNOWN,
        namespace=pod.namespace,
        name=pod.name,
        owner_kind=facts.owner_kind,
        owner_name=facts.owner_name,
        labels=facts.labels,
        requested=requested or None,
        deleted_time_ns=deleted_ns if deleted_ns is None or deleted_ns <= time_ns else None,
    )


def attribute_incident(incident: Incident, pods: PodCache) -> AttributedIncident:
    """Return an incident with the pods that use the GPU and the pods to which it is allocated.

    The pods are found in the same way as an event's pods, so a node cannot name the pods of another
    node.
    """
    identities = list(map(identity_of, incident.processes))
    event_pods = EventPods(pods, node=incident.node, time_ns=incident.time_ns)
    event_pods.add_users(
        identities, foreign=find_foreign_pods(identities, pods, node=incident.node)
    )
    allocated = incident.allocations
    event_pods.add_allocations(allocated or ())
    return AttributedIncident(
        incident=incident,
        pods=event_pods.descriptions(),
        process_pods=[event_pods.position_of(identity) for identity in identities] or None,
        allocation_pods=None
        if allocated is None
        else [
            event_pods.add_allocatee((allocation.namespace, allocation.pod))
            for allocation in allocated
        ],
    )
