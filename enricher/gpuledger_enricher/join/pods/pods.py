"""The pods and nodes of a worker's partitions, and all namespaces, from the compacted topics.

These are caches: pods by UID, by container id and by the hash of static pods; nodes and namespaces
by name. They are filled record by record and do not use the bus. `describe` makes descriptions from
them. For each object, earlier versions are kept as well, in the same way for every kind
(`KnownObject`).

Each kind of name has its own mapping. Otherwise a person who can write one kind of name could claim
a name of another kind. Whichever name leads to a pod, the pod counts for a node only if the pod's
record places it there.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from gpuledger.clock import NS_PER_HOUR, NS_PER_MINUTE, NS_PER_SECOND
from gpuledger.keys import key_in, split_key
from gpuledger.records import (
    NamespaceDescription,
    NamespaceRecord,
    NodeDescription,
    NodeRecord,
    PodRecord,
)
from gpuledger_enricher.watched_records import WatchedRecord, is_older

# A container that crashes repeatedly restarts about every five minutes: 72 times in the six hours
# for which ticks are kept and can be joined again.
MAX_FORMER_CONTAINERS: Final = 100
PAST_VERSIONS_NS: Final = 8 * NS_PER_HOUR
"""How long versions are kept after newer ones have replaced them: the retention of samples plus the
hours for which samples may have waited on their node."""
MAX_PAST_VERSIONS: Final = 4_096
"""Maximum number of earlier versions per object. A pod whose labels change all the time gets a new
version every few seconds."""
SKEW_NS: Final = NS_PER_MINUTE
"""Assumed difference between the clocks of a node and the API server: devices may be allocated to a
pod this long before its creation."""
LINGER_NS: Final = 5 * NS_PER_SECOND
"""How long a kubelet may still list the devices of a pod that the API server no longer has."""
NAMED_NS: Final = 10 * NS_PER_MINUTE
"""How long a deleted pod is kept after the last tick that contains it. Podwatch's default delay of
tombstones is longer, so a pod whose processes ended with it is forgotten with its tombstone."""
_NONE: Final[dict[str, str]] = {}
_NOW_NS: Final = 2**63
"""A time after all known times, which looks up the present state."""
N = TypeVar("N", str, tuple[str, str])
OnNode = tuple[str, str]
"""A node, and a name that is valid on this node only."""


RecordOf = TypeVar("RecordOf", bound=WatchedRecord)
FactsT = TypeVar("FactsT")
DescriptionT = TypeVar("DescriptionT", bound=NodeDescription | NamespaceDescription)


class PastVersion(NamedTuple, Generic[FactsT]):
    """Facts of an object that were in force until a newer version of the object changed them."""

    until_ns: int
    """When podwatch saw the version that changed the facts."""
    resource_version: str
    """The last version with these facts."""
    facts: FactsT
    """The facts that descriptions contain."""


class KnownObject(msgspec.Struct, Generic[RecordOf, FactsT], gc=False):
    """Everything known about one object; a Struct, because a worker keeps 100,000 of them."""

    record: RecordOf
    """The newest version."""
    partition: int
    """The partition that the record was read from."""
    past: tuple[PastVersion[FactsT], ...] = ()
    """Earlier versions with other facts, ordered by the time until which each was in force."""

    def facts(self) -> FactsT:
        """Return those facts of the newest version that descriptions contain."""
        raise NotImplementedError

    def at(self, time_ns: int) -> FactsT:
        """Return the facts of the version that was in force at a time.

        This is the newest version that podwatch had seen by then. If podwatch had not seen any, it
        is the oldest known version.
        """
        for past in self.past:
            if time_ns < past.until_ns:
                return past.facts
        return self.facts()

    def follow(self, before: "KnownObject[RecordOf, FactsT]", *, seen_time_ns: int) -> None:
        """Take over the history of the older version that this one replaces.

        `seen_time_ns` is when podwatch saw this version. Versions are ordered by `resourceVersion`,
        or in the order in which they were written if that cannot be compared. They are never
        ordered by the times at which podwatch saw them, because podwatch's clock may be set back.
        An older version that was seen at a later time than this one counts as never in force.
        """
        now, version = self.facts(), self.record.resource_version
        earlier = PastVersion(seen_time_ns, before.record.resource_version, before.facts())
        self.past = before.past
        if earlier.facts == now and not (self.past and self.past[-1].until_ns > seen_time_ns):
            return  # no fact in the description has changed
        if version == earlier.resource_version and earlier.facts == now:
            return  # the same version was read again
        for index, past in enumerate(self.past):
            if past.resource_version == version and past.facts == now:
                # The topic is read again, and its versions cannot be compared: the later versions
                # that are known will be read again, too.
                self.past = self.past[:index]
                return
        known = [*self.past, earlier]
        while len(known) > 1 and known[-2].until_ns >= seen_time_ns:
            known.pop()  # seen later than the newer version, so it was never in force
        last = known.pop()
        if last.facts != now:
            known.append(last._replace(until_ns=seen_time_ns))
        eldest_ns = seen_time_ns - PAST_VERSIONS_NS
        self.past = tuple(version for version in known if version.until_ns > eldest_ns)[
            -MAX_PAST_VERSIONS:
        ]


class PodFacts(NamedTuple):
    """The facts in a pod's description that may differ between versions."""

    owner_kind: str | None
    owner_name: str | None
    labels: dict[str, str]


class KnownPod(KnownObject[PodRecord, PodFacts], gc=False):
    """Everything known about one pod. A deletion has its own time, and is not a version."""

    previous_containers: dict[str, str] = msgspec.field(default_factory=dict)
    """Names of containers in earlier versions, by container id."""

    @override
    def facts(self) -> PodFacts:
        return PodFacts(self.record.owner_kind, self.record.owner_name, self.record.labels)

    def changes_ns(self) -> list[int]:
        """Return the times at which the pod's description changes."""
        deleted_ns = self.record.deleted_time_ns
        changes = [past.until_ns for past in self.past]
        return changes if deleted_ns is None else [*changes, deleted_ns]

    def is_gone(self, time_ns: int) -> bool:
        """Return whether the API server had deleted the pod at a time."""
        deleted_ns = self.record.deleted_time_ns
        return deleted_ns is not None and deleted_ns <= time_ns

    def was_there(self, time_ns: int) -> bool:
        """Return whether the API server had the pod at a time."""
        return self.record.created_time_ns <= time_ns and not self.is_gone(time_ns)

    def may_hold(self, time_ns: int) -> bool:
        """Return whether devices may be allocated to the pod at a time.

        Differences between clocks and the delay of kubelets are tolerated.
        """
        is_made = self.record.created_time_ns <= time_ns + SKEW_NS
        return is_made and not self.is_gone(time_ns - LINGER_NS)

    def holder_changes_ns(self) -> list[int]:
        """Return the times at which `may_hold` changes."""
        deleted_ns = self.record.deleted_time_ns
        made_ns = self.record.created_time_ns - SKEW_NS
        return [made_ns] if deleted_ns is None else [made_ns, deleted_ns + LINGER_NS]

    def rank_at(self, time_ns: int) -> tuple[bool, bool, int, str]:
        """Return a sort key for pods of the same name: the maximum is the pod that has the name.

        A pod that was created by that time ranks higher. Among such pods, a pod that was not
        deleted by that time ranks higher, and then the newer pod.
        """
        created_ns, deleted_ns = self.record.created_time_ns, self.record.deleted_time_ns
        is_there_still = deleted_ns is None or time_ns < deleted_ns
        return created_ns <= time_ns, is_there_still, created_ns, self.record.uid

    def container_ids(self) -> list[str]:
        """Return the ids of the containers that the pod has or had."""
        return [*self.previous_containers, *ids_of(self.record)]

    def replace_version(self, before: "KnownPod", *, seen_time_ns: int) -> None:
        """Take over the history of an older version (`follow`) and the names of its containers."""
        self.follow(before, seen_time_ns=seen_time_ns)
        self.previous_containers = _former(
            before.previous_containers | ids_of(before.record), self.record
        )

    def add_older(self, pod: PodRecord) -> None:
        """Add the names of an older version's containers; that version was read after this one."""
        self.previous_containers = _former(ids_of(pod) | self.previous_containers, self.record)

    def container_name(self, container_id: str | None) -> str | None:
        """Return the name of a container that the pod has or had; `None` for other containers."""
        names = self.previous_containers | ids_of(self.record)
        return names.get(container_id or "")


class Existence(NamedTuple, Generic[DescriptionT]):
    """A version of an object: its description, and the time for which the object existed."""

    description: DescriptionT
    """The description in events."""
    created_time_ns: int
    """When the object was created; an earlier object of the same name is a different object."""
    deleted_time_ns: int | None
    """When the object was deleted; `None` if it was not."""

    def changes_ns(self) -> list[int]:
        """Return the times of the object's creation and deletion, as far as known."""
        created_ns, deleted_ns = self.created_time_ns, self.deleted_time_ns
        return [created_ns] if deleted_ns is None else [created_ns, deleted_ns]


class KnownNode(KnownObject[NodeRecord, Existence[NodeDescription]], gc=False):
    """Everything known about one node."""

    @override
    def facts(self) -> Existence[NodeDescription]:
        node = self.record
        description = NodeDescription(
            pool=node.pool,
            instance_type=node.instance_type,
            zone=node.zone,
            region=node.region,
            capacity_type=node.capacity_type,
            labels=node.labels or None,
        )
        return Existence(description, node.created_time_ns, node.deleted_time_ns)


class KnownNamespace(KnownObject[NamespaceRecord, Existence[NamespaceDescription]], gc=False):
    """Everything known about one namespace."""

    @override
    def facts(self) -> Existence[NamespaceDescription]:
        namespace = self.record
        description = NamespaceDescription(
            name=namespace.name,
            labels=namespace.labels or None,
            annotations=namespace.annotations or None,
        )
        return Existence(description, namespace.created_time_ns, namespace.deleted_time_ns)


class NamedObjects(Generic[DescriptionT]):
    """The nodes or the namespaces known to a worker, by cluster and name.

    Memory is bounded by the objects in the worker's partitions. Each object keeps its versions of
    the last eight hours.
    """

    def __init__(
        self,
        make: Callable[[Any, int], KnownObject[Any, Existence[DescriptionT]]],
    ) -> None:
        """`make` takes a record and its partition, and returns the known object."""
        self._make: Callable[[Any, int], KnownObject[Any, Existence[DescriptionT]]] = make
        self._objects: dict[str, KnownObject[Any, Existence[DescriptionT]]] = {}
        self._per_cluster: Counter[str] = Counter()
        self._changed: dict[str, int] = {}
        self._changes = 0

    def __len__(self) -> int:
        return len(self._objects)

    def has_cluster(self, cluster: str) -> bool:
        """Return whether an object of the cluster is known."""
        return self._per_cluster[cluster] > 0

    def version_of(self, key: str) -> int:
        """Return a number that grows with each change of an object; 0 if the object is unknown."""
        return self._changed.get(key, 0)

    def at(self, key: str, time_ns: int) -> DescriptionT | None:
        """Return the description at a time; `None` if no object is known for that time."""
        known = self._objects.get(key)
        if known is None:
            return None
        description, created_ns, deleted_ns = known.at(time_ns)
        is_there = created_ns <= time_ns and (deleted_ns is None or time_ns < deleted_ns)
        return description if is_there else None

    def changes_ns(self, key: str) -> list[int]:
        """Return the times at which an object's description may change."""
        known = self._objects.get(key)
        if known is None:
            return []
        changes: list[int] = []
        for until_ns, _, facts in known.past:
            changes += [until_ns, *facts.changes_ns()]
        return changes + known.facts().changes_ns()

    def put(
        self, record: NodeRecord | NamespaceRecord, *, partition: int, seen_time_ns: int
    ) -> None:
        """Store a record unless a newer version is known."""
        key = key_in(record.cluster, record.name)
        before = self._objects.get(key)
        if before and _is_former(record, than=before.record):
            return
        known: KnownObject[Any, Existence[DescriptionT]] = self._make(record, partition)
        if before:
            known.follow(before, seen_time_ns=seen_time_ns)
        else:
            self._per_cluster[record.cluster] += 1
        self._objects[key] = known
        self._changes += 1
        self._changed[key] = self._changes

    def remove(self, key: str, *, partition: int) -> None:
        """Forget an object; do nothing if it is unknown or belongs to another partition."""
        known = self._objects.get(key)
        if known is not None and known.partition == partition:
            del self._objects[key], self._changed[key]
            cluster = split_key(key)[0]
            self._per_cluster[cluster] -= 1
            if not self._per_cluster[cluster]:
                del self._per_cluster[cluster]

    def remove_partition(self, partition: int) -> None:
        """Forget the objects of a partition that is no longer assigned."""
        for key in [
            key for key, watched in self._objects.items() if watched.partition == partition
        ]:
            self.remove(key, partition=partition)


def _is_former(record: NodeRecord | NamespaceRecord, *, than: NodeRecord | NamespaceRecord) -> bool:
    """Return whether a record is older than `than`, which has the same cluster and name.

    It is older if it is an earlier version of the same object, or if its object was created
    earlier. Versions are compared within one object only, because a cluster that is rebuilt counts
    versions from 1 again.
    """
    if record.uid == than.uid:
        return is_older(record, than=than)
    return record.created_time_ns < than.created_time_ns


class ClusterObjects:
    """The nodes of a worker's partitions, and all namespaces."""

    def __init__(self) -> None:
        self.nodes: NamedObjects[NodeDescription] = NamedObjects(KnownNode)
        self.namespaces: NamedObjects[NamespaceDescription] = NamedObjects(KnownNamespace)

    def is_removed(self, node: str, time_ns: int) -> bool:
        """Return whether the API server had no such node at a time.

        Returns false for a cluster without podwatch. Known namespaces show that a cluster has a
        podwatch, because every worker has the namespaces of all clusters. Known nodes do not show
        it, because a worker has only the nodes of its partitions.
        """
        has_podwatch = self.namespaces.has_cluster(split_key(node)[0])
        return has_podwatch and self.nodes.at(node, time_ns) is None


class NodePods:
    """The UIDs of a node's pods, and a number that grows whenever one of the pods changes."""

    __slots__ = ("uids", "version")

    def __init__(self) -> None:
        self.uids: set[str] = set()
        self.version = 0


class NamedPods:
    """The pods that a node's ticks have named lately."""

    __slots__ = ("last_ns", "time_ns", "uids")

    def __init__(self) -> None:
        self.uids: Collection[str] = ()
        """The UIDs of the pods that the last tick named."""
        self.time_ns = 0
        """The time of the last tick."""
        self.last_ns: dict[str, int] = {}
        """The pods by UID, with the time of the last tick that named the pod. The times of the pods
        in `uids` are renewed only when a tick names other pods."""


class Names(Generic[N]):
    """Finds pods by names of one kind, such as container ids; several pods may claim one name.

    A younger pod cannot take over a name while the older pod lives. Otherwise a person who may
    create pods could have the use of another pod attributed to their own pod. A static pod keeps
    its hash when its object in the API server is recreated: the old object is then deleted, and
    earlier ticks belong to the old object. The result does not depend on the order in which records
    arrive.
    """

    def __init__(self, pods: Mapping[str, KnownPod]) -> None:
        self._pods = pods
        self._uid_of: dict[N, str] = {}
        self._rivals: dict[N, set[str]] = {}
        """UIDs of the pods that claim a name if there are several, including the pod that has it.
        """

    def holder(self, name: N) -> KnownPod | None:
        """Return the pod that has a name; `None` if the name is unknown."""
        return self._pods.get(self._uid_of.get(name, ""))

    def holder_at(self, name: N, time_ns: int) -> KnownPod | None:
        """Return the oldest claimant that existed at a time, else the pod that has the name now."""
        there = [
            known
            for uid in self._rivals.get(name, ())
            if (known := self._pods[uid]).was_there(time_ns)
        ]
        if not there:
            return self.holder(name)
        return min(there, key=lambda known: (known.record.created_time_ns, known.record.uid))

    def changes_ns(self, name: N) -> list[int]:
        """Return the times at which a name may pass from one pod to another."""
        changes: list[int] = []
        for uid in self._rivals.get(name, ()):
            pod = self._pods[uid].record
            changes.append(pod.created_time_ns)
            if pod.deleted_time_ns is not None:
                changes.append(pod.deleted_time_ns)
        return changes

    def claim(self, name: N, pod: PodRecord) -> None:
        """Assign a name to this pod unless another pod has a better claim."""
        holder = self.holder(name)
        if holder is None:
            self._uid_of[name] = pod.uid
        elif holder.record.uid != pod.uid:
            self._rivals.setdefault(name, {holder.record.uid}).add(pod.uid)
            if _right_to_name(pod) < _right_to_name(holder.record):
                self._uid_of[name] = pod.uid

    def disclaim(self, name: N, uid: str) -> None:
        """Withdraw a removed pod's claim on a name; do nothing if the pod has no claim."""
        rivals = self._rivals.get(name)
        if rivals is None:
            if self._uid_of.get(name) == uid:
                del self._uid_of[name]
        elif uid in rivals:
            rivals.remove(uid)
            if self._uid_of[name] == uid:
                left = (self._pods[key].record for key in rivals)
                self._uid_of[name] = min(left, key=_right_to_name).uid
            if len(rivals) == 1:
                del self._rivals[name]


class PodCache:
    """The known pods of one cluster; memory is bounded by the pods in the worker's partitions.

    Processes may outlive their pod and its tombstone, for example if a pod was deleted by force. A
    pod that the ticks of its node name is therefore kept after its tombstone (`keep_named`).
    """

    def __init__(self, changes: Iterator[int] | None = None) -> None:
        """Create an empty cache.

        `changes` numbers the changes of pods; successive caches of one cluster must share it.
        """
        self._pods: dict[str, KnownPod] = {}
        self._by_container: Names[str] = Names(self._pods)
        """Pods by container id. If pods of several nodes have the same id, only the pods of the
        first node are here."""
        self._by_container_on_node: Names[OnNode] = Names(self._pods)
        """Pods of the other nodes, by node and container id. Kubelets may report any id, so an id
        may occur on several nodes."""
        self._by_hash: Names[OnNode] = Names(self._pods)
        self._nodes: dict[str, NodePods] = {}
        # By name only, because the record already has this string; tuples take 100 bytes more per
        # pod.
        self._uids_by_name: dict[str, str | set[str]] = {}
        self._changes = changes or count(1)
        self._named: dict[str, NamedPods] = {}
        """By node."""
        self._kept_after_tombstone: set[str] = set()
        """UIDs of the pods that are kept although their tombstones were read."""

    def __len__(self) -> int:
        return len(self._pods)

    def version_of(self, node: str) -> int:
        """Return a number that grows with each change of a node's pods; 0 for a node without pods.

        Values that were derived from the pods are valid until the number changes.
        """
        known = self._nodes.get(node)
        return known.version if known else 0

    def put(self, pod: PodRecord, *, partition: int, seen_time_ns: int = 0) -> None:
        """Store a pod's record; it never replaces a newer record.

        `seen_time_ns` is when podwatch saw this version: until then, the previous version is in
        force. If a newer version is known, only the names of the containers are added.
        """
        before = self._pods.get(pod.uid)
        self._remove(pod.uid)
        known = KnownPod(pod, partition, previous_containers=_NONE)
        if before and is_older(pod, than=before.record):
            known = before
            known.add_older(pod)
        elif before:
            known.replace_version(before, seen_time_ns=seen_time_ns)
        self._pods[pod.uid] = known
        self._claim(known)
        node = self._nodes.setdefault(known.record.node, NodePods())
        node.uids.add(pod.uid)
        self._touch(node)

    def remove(self, uid: str, *, partition: int, time_ns: int) -> None:
        """Forget a pod; do nothing if it is unknown or belongs to another partition.

        A pod that recent ticks contain is kept, as deleted, until ticks no longer contain it. If
        its record has no time of the deletion, it was deleted at `time_ns`.
        """
        known = self._pods.get(uid)
        if known is None or known.partition != partition:
            return
        named = self._named.get(known.record.node)
        if named is None or uid not in named.last_ns:
            self._remove(uid)
            return
        if known.record.deleted_time_ns is None:
            self.put(replace(known.record, deleted_time_ns=time_ns), partition=partition)
        self._kept_after_tombstone.add(uid)

    def keep_named(self, uids: Collection[str], *, node: str, time_ns: int) -> None:
        """Record the pods of a tick, and forget deleted pods that ticks no longer contain."""
        named = self._named.get(node)
        if named is None:
            if not uids:
                return
            named = self._named[node] = NamedPods()
        last_ns = named.last_ns
        # The common case, in each tick: no set of pods has to be built or compared.
        if named.uids is uids and len(last_ns) == len(uids):
            named.time_ns = time_ns
            return
        last_ns.update(dict.fromkeys(named.uids, named.time_ns))
        last_ns.update(dict.fromkeys(uids, time_ns))
        named.uids, named.time_ns = uids, time_ns
        # The node's clock may have been set back since.
        past = [uid for uid, at_ns in last_ns.items() if abs(time_ns - at_ns) > NAMED_NS]
        for uid in past:
            del last_ns[uid]
            self._forget_if_deleted(uid)
        if not last_ns:
            del self._named[node]

    def forget_node(self, node: str) -> None:
        """Forget the deleted pods that were kept for a node that no longer sends ticks."""
        if named := self._named.pop(node, None):
            for uid in named.last_ns:
                self._forget_if_deleted(uid)

    def _forget_if_deleted(self, uid: str) -> None:
        if uid in self._kept_after_tombstone:
            self._remove(uid)

    def _remove(self, uid: str) -> None:
        known = self._pods.pop(uid, None)
        if known is None:
            return
        self._kept_after_tombstone.discard(uid)
        self._disclaim(known)
        node = self._nodes[known.record.node]
        node.uids.discard(uid)
        self._touch(node)
        if not node.uids:
            del self._nodes[known.record.node]

    def remove_partition(self, partition: int) -> None:
        """Forget the pods of a partition that is no longer assigned."""
        for known in [known for known in self._pods.values() if known.partition == partition]:
            self._named.pop(known.record.node, None)
            self._remove(known.record.uid)

    def find(
        self, uid: str | None, container_id: str | None, *, node: str, time_ns: int = _NOW_NS
    ) -> KnownPod | None:
        """Return a node's pod, given a cgroup path's UID and container id; `None` if not found.

        Container ids are tried first, because they are never reused. Pods of other nodes are never
        returned, whatever their records contain. The UID in a cgroup path may also be the
        configuration hash of a static pod. A hash is valid on one node only, because nodes that
        load manifests from the same address use the same hash. If a static pod was recreated in the
        API server, the object that existed at `time_ns` is returned.
        """
        found: list[KnownPod | None] = []
        if container_id is not None:
            found.append(self._by_container.holder_at(container_id, time_ns))
            found.append(self._by_container_on_node.holder_at((node, container_id), time_ns))
        if uid is not None:
            found.append(self._pods.get(uid))
            found.append(self._by_hash.holder_at((node, uid), time_ns))
        # A name may lead to another node's pod, which does not count here: try the next name.
        return next((known for known in found if known and known.record.node == node), None)

    def name_changes_ns(
        self, uid: str | None, container_id: str | None, *, node: str
    ) -> Iterator[int]:
        """Yield the times at which the result of `find` may change to another pod."""
        if container_id is not None:
            yield from self._by_container.changes_ns(container_id)
            yield from self._by_container_on_node.changes_ns((node, container_id))
        if uid is not None:
            yield from self._by_hash.changes_ns((node, uid))

    def find_pod_of_other_node(
        self, uid: str | None, container_id: str | None, *, node: str
    ) -> PodRecord | None:
        """Return the record of another node's pod, given a cgroup path's UID and container id.

        Return `None` if `find` finds a pod of this node, or if this worker has no record of such a
        pod; records in the partitions of other workers are unknown.
        """
        if self.find(uid, container_id, node=node) is not None:
            return None
        known = self._pods.get(uid or "") or self._by_container.holder(container_id or "")
        return known.record if known else None

    def is_placed_elsewhere(self, namespace: str, name: str, *, node: str, time_ns: int) -> bool:
        """Return whether a known pod of that name is on another node.

        A pod that was deleted by `time_ns` does not count, because the next pod of the same name
        may be on any node.
        """
        uids = self._uids_by_name.get(name, ())
        for uid in (uids,) if isinstance(uids, str) else uids:
            known = self._pods[uid]
            is_meant = known.record.namespace == namespace and known.record.node != node
            if is_meant and not known.is_gone(time_ns):
                return True
        return False

    def named_on(self, node: str) -> dict[tuple[str, str], list[KnownPod]]:
        """Return a node's pods by namespace and name; successive pods may have the same name."""
        here = self._nodes.get(node)
        named: dict[tuple[str, str], list[KnownPod]] = {}
        for known in map(self._pods.__getitem__, here.uids if here else ()):
            named.setdefault((known.record.namespace, known.record.name), []).append(known)
        return named

    def _claim(self, known: KnownPod) -> None:
        """Register a pod's names; a pod never takes a name from a pod of another node."""
        pod = known.record
        for name in known.container_ids():
            holder = self._by_container.holder(name)
            if holder is None or holder.record.node == pod.node:
                self._by_container.claim(name, pod)
            else:
                self._by_container_on_node.claim((pod.node, name), pod)
        if pod.config_hash is not None:
            self._by_hash.claim((pod.node, pod.config_hash), pod)
        uids = self._uids_by_name.setdefault(pod.name, pod.uid)
        if isinstance(uids, set):
            uids.add(pod.uid)
        elif uids != pod.uid:
            self._uids_by_name[pod.name] = {uids, pod.uid}

    def _disclaim(self, known: KnownPod) -> None:
        pod = known.record
        for name in known.container_ids():
            self._by_container.disclaim(name, pod.uid)
            self._by_container_on_node.disclaim((pod.node, name), pod.uid)
        if pod.config_hash is not None:
            self._by_hash.disclaim((pod.node, pod.config_hash), pod.uid)
        uids = self._uids_by_name[pod.name]
        if isinstance(uids, set):
            uids.discard(pod.uid)
        if not isinstance(uids, set) or not uids:
            del self._uids_by_name[pod.name]

    def _touch(self, node: NodePods) -> None:
        node.version = next(self._changes)


class ClusterPods:
    """The pods known to a worker, by cluster; names, UIDs and ids are unique only within a cluster.

    Memory is bounded by the pods of the worker's partitions; clusters without pods are dropped.
    """

    def __init__(self) -> None:
        self._clusters: dict[str, PodCache] = {}
        # One counter for all caches: descriptions are valid for one version of a node's pods, so
        # the number of a version must never recur.
        self._changes = count(1)

    def __len__(self) -> int:
        return sum(map(len, self._clusters.values()))

    def of(self, cluster: str) -> PodCache:
        """Return the pods of a cluster; an empty cache if the cluster is unknown."""
        return self._clusters.get(cluster) or PodCache()

    def put(self, pod: PodRecord, *, partition: int, seen_time_ns: int = 0) -> None:
        """Store a pod's record in its cluster's cache (`PodCache.put`)."""
        pods = self._clusters.setdefault(pod.cluster, PodCache(self._changes))
        pods.put(pod, partition=partition, seen_time_ns=seen_time_ns)

    def remove(self, key: str, *, partition: int, time_ns: int) -> None:
        """Forget a pod by key, because its tombstone was read at `time_ns` (`PodCache.remove`)."""
        cluster, uid = split_key(key)
        if pods := self._clusters.get(cluster):
            pods.remove(uid, partition=partition, time_ns=time_ns)
            self._drop_empty()

    def keep_named(self, uids: Collection[str], *, cluster: str, node: str, time_ns: int) -> None:
        """Keep the pods that a node's tick contains (`PodCache.keep_named`)."""
        pods = self._clusters.get(cluster)
        if pods is not None:
            pods.keep_named(uids, node=node, time_ns=time_ns)
            if not pods:
                self._drop_empty()

    def forget_node(self, node: str) -> None:
        """Forget the deleted pods that were kept for a node, by the node's key."""
        cluster, name = split_key(node)
        if pods := self._clusters.get(cluster):
            pods.forget_node(name)
            self._drop_empty()

    def remove_partition(self, partition: int) -> None:
        """Forget the pods of a partition that is no longer assigned."""
        for pods in self._clusters.values():
            pods.remove_partition(partition)
        self._drop_empty()

    def _drop_empty(self) -> None:
        self._clusters = {cluster: pods for cluster, pods in self._clusters.items() if len(pods)}


def nearest(pods: Iterable[KnownPod], *, time_ns: int) -> KnownPod | None:
    """Return the pod that had the name at a time, among pods of one name; `None` without pods."""
    return max(pods, key=lambda known: known.rank_at(time_ns), default=None)


def ids_of(pod: PodRecord) -> dict[str, str]:
    """Return the names of a pod's current and previous containers, by container id."""
    names = {}
    for container in pod.containers:
        if container.previous_container_id is not None:
            names[container.previous_container_id] = container.name
        if container.container_id is not None:
            names[container.container_id] = container.name
    return names


def _right_to_name(pod: PodRecord) -> tuple[bool, int, str]:
    """Return a sort key for the pods that claim a name: the minimum is the pod that gets it.

    This is the oldest pod that is not deleted. If all are deleted, it is the newest one.
    """
    if pod.deleted_time_ns is None:
        return False, pod.created_time_ns, pod.uid
    return True, -pod.created_time_ns, pod.uid


def _former(earlier: dict[str, str], pod: PodRecord) -> dict[str, str]:
    """Return the names of containers that only earlier versions of a pod contain, by id.

    If there are too many, only the newest containers are kept.
    """
    named = ids_of(pod)
    previous_containers = [item for item in earlier.items() if item[0] not in named]
    return dict(previous_containers[-MAX_FORMER_CONTAINERS:]) if previous_containers else _NONE
