"""What is known of the cluster's objects, slim: pods, nodes and namespaces.

Here live the records of `gpuledger.pods.v1`, `gpuledger.nodes.v1` and `gpuledger.namespaces.v1`,
compacted topics, of which pods are keyed by cluster and UID, nodes and namespaces by cluster and
name. They say what a container id or a UID stands for, where work ran, and whose it is.
"""

from typing import Annotated

from gpuledger.records.base import BaseRecord, ClusterName, Integer, Natural, NodeName
from gpuledger.records.bounds import (
    MAX_CLAIMS,
    MAX_POD_CONTAINERS,
    MAX_RESOURCES,
    Annotations,
    Id,
    Label,
    Labels,
    QualifiedName,
    Ratio,
    Subdomain,
    Word,
    at_most,
)


class ContainerRequest(BaseRecord, frozen=True, kw_only=True):
    """What a container asks for of GPUs, as its pod's spec says it; a description, not a holding.

    What it holds is what the kubelet gave it, which the ticks say.
    """

    resources: Annotated[dict[QualifiedName, Natural], at_most(MAX_RESOURCES)]
    """Amounts by resource name, each in that resource's own unit: GPUs, instances, MiB, percent."""
    mps_active_thread_ratio: Ratio | None = None
    """The part of a GPU's threads that CUDA's MPS lets it have: its variable
    `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`, where the spec has it as a literal."""
    claims: Annotated[list[Subdomain], at_most(MAX_CLAIMS)] | None = None
    """The ResourceClaims that it names, of whatever devices: a pod does not say which."""


class PodContainer(BaseRecord, frozen=True, kw_only=True):
    """A container of a pod as its status names it."""

    name: Label
    """The container's name in the pod."""
    kind: Word | None = None
    """`init`, `sidecar` (an init container that is always restarted), or `ephemeral`; absent for
    the pod's ordinary containers."""
    requested: ContainerRequest | None = None
    """What it asks for of GPUs; absent where that is nothing."""
    container_id: Id | None = None
    """The runtime's id without its scheme; absent until the container was started."""
    restarts: Natural
    """How often it was started again; each time under another id."""
    started_time_ns: Natural | None = None
    """When it was started, where it runs or has run."""
    ended_time_ns: Natural | None = None
    """When it ended, where it has."""
    # Ticks of the former container may come behind the record of its restart.
    previous_container_id: Id | None = None
    """The id that it had before it was started again, where the status still names it."""


class PodRecord(BaseRecord, frozen=True, kw_only=True):
    """A pod that has a node, at one version of its object in the API server."""

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    uid: Id
    """The pod's UID: its identity, also where its name is used again."""
    namespace: Label
    """The pod's namespace."""
    name: Subdomain
    """The pod's name."""
    node: NodeName
    """The node on which it runs; its record's partition is that node's."""
    owner_kind: Word | None = None
    """Kind of the workload that people know it by, such as `Deployment` or `Job`."""
    owner_name: Subdomain | None = None
    """Name of that workload."""
    labels: Labels
    """The labels that the settings ask for."""
    annotations: Annotations | None = None
    """The annotations that the settings ask for; absent where none of them is there."""
    containers: Annotated[list[PodContainer], at_most(MAX_POD_CONTAINERS)]
    """All containers, init and ephemeral ones included."""
    config_hash: Id | None = None
    """A static pod's hash, by which cgroup paths call it instead of its UID."""
    phase: Word
    """`Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`."""
    qos_class: Word | None = None
    """`Guaranteed`, `Burstable` or `BestEffort`."""
    priority: Integer | None = None
    """The scheduler's priority."""
    priority_class: Subdomain | None = None
    """Name of the class that the priority comes from."""
    created_time_ns: Natural
    """When the API server made the object, nanoseconds since the epoch."""
    started_time_ns: Natural | None = None
    """When the kubelet took it on."""
    ended_time_ns: Natural | None = None
    """When the last of its containers ended, where all have."""
    deletion_time_ns: Natural | None = None
    """When its deletion was asked for, its grace included: `metadata.deletionTimestamp`."""
    deleted_time_ns: Natural | None = None
    """When it left the API server, as far as the pod watch could see."""
    resource_version: Word
    """The version of the object; of a pod that a list did not have any more, that of the list."""


class NodeRecord(BaseRecord, frozen=True, kw_only=True):
    """A node, at one version of its object in the API server.

    What its provider says of it is taken from labels, of which each provider has its own.
    """

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    uid: Id
    """The UID of the Node object: its identity, also where its name is used again."""
    name: NodeName
    """The node's name; its record's partition is that of the node's other records."""
    pool: Label | None = None
    """The node pool or node group that it belongs to."""
    instance_type: Label | None = None
    """The provider's name of the kind of machine, such as `p5.48xlarge`."""
    zone: Label | None = None
    """The provider's zone."""
    region: Label | None = None
    """The provider's region."""
    capacity_type: Label | None = None
    """How its capacity was bought: `spot`, `on_demand`, `reserved`, or what else a label says."""
    labels: Labels
    """The labels that the settings ask for."""
    created_time_ns: Natural
    """When the API server made the object, nanoseconds since the epoch."""
    deletion_time_ns: Natural | None = None
    """When its deletion was asked for: `metadata.deletionTimestamp`."""
    deleted_time_ns: Natural | None = None
    """When it left the API server, as far as podwatch could see."""
    resource_version: Word
    """The version of the object; of one that a list did not have any more, that of the list."""


class NamespaceRecord(BaseRecord, frozen=True, kw_only=True):
    """A namespace, at one version of its object in the API server."""

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    uid: Id
    """The UID of the Namespace object: its identity, also where its name is used again."""
    name: Label
    """The namespace's name."""
    labels: Labels
    """The labels that the settings ask for."""
    annotations: Annotations | None = None
    """The annotations that the settings ask for; absent where none of them is there."""
    created_time_ns: Natural
    """When the API server made the object, nanoseconds since the epoch."""
    deletion_time_ns: Natural | None = None
    """When its deletion was asked for: `metadata.deletionTimestamp`."""
    deleted_time_ns: Natural | None = None
    """When it left the API server, as far as podwatch could see."""
    resource_version: Word
    """The version of the object; of one that a list did not have any more, that of the list."""
