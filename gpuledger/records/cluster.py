"""Descriptions of the cluster's objects, reduced to what is needed: pods, nodes and namespaces.

This module holds the records of `gpuledger.pods.v1`, `gpuledger.pending-pods.v1`,
`gpuledger.nodes.v1` and `gpuledger.namespaces.v1`. These topics are compacted; keys are cluster and
UID for pods, cluster and name for nodes and namespaces. Other components use these records to look
up container ids and UIDs, and to find where work ran or waited and to whom it belongs.
"""

from typing import Annotated

from gpuledger.records.base import BaseRecord, ClusterName, Integer, Natural, NodeName
from gpuledger.records.bounds import (
    MAX_CLAIMS,
    MAX_POD_CONTAINERS,
    MAX_RESOURCES,
    MAX_SCHEDULING_GATES,
    Annotations,
    Id,
    Label,
    Labels,
    QualifiedName,
    Ratio,
    Sentence,
    Subdomain,
    Word,
    at_most,
)


class ContainerRequest(BaseRecord, frozen=True, kw_only=True):
    """A container's request for GPUs, from its pod's spec.

    A request is not an allocation: samples report the devices that the kubelet has allocated.
    """

    resources: Annotated[dict[QualifiedName, Natural], at_most(MAX_RESOURCES)]
    """Amounts by resource name, in the resource's own unit: GPUs, instances, MiB or percent."""
    mps_active_thread_ratio: Ratio | None = None
    """Share of a GPU's threads that CUDA MPS allows the container: the environment variable
    `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`, if the spec gives it as a literal."""
    claims: Annotated[list[Subdomain], at_most(MAX_CLAIMS)] | None = None
    """Names of its ResourceClaims, for devices of any kind, because a pod does not contain the
    kind."""


class PodContainer(BaseRecord, frozen=True, kw_only=True):
    """A container from a pod's status."""

    name: Label
    """The container's name in the pod."""
    kind: Word | None = None
    """`init`, `sidecar` (an init container that is always restarted) or `ephemeral`; absent for
    ordinary containers."""
    requested: ContainerRequest | None = None
    """Its request for GPUs; absent if it requests none."""
    container_id: Id | None = None
    """The runtime's id without its scheme; absent until the container has started."""
    restarts: Natural
    """Number of restarts; each gives the container a new id."""
    started_time_ns: Natural | None = None
    """When it started, if it runs or has run."""
    ended_time_ns: Natural | None = None
    """When it ended, if it has."""
    # Ticks of the previous container may arrive after the record of the restart.
    previous_container_id: Id | None = None
    """Its id before the last restart, if the status still has it."""


class PodRecord(BaseRecord, frozen=True, kw_only=True):
    """A pod that is assigned to a node, at one version of its object in the API server."""

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    uid: Id
    """UID of the pod: its identity, even if the name is reused."""
    namespace: Label
    """The pod's namespace."""
    name: Subdomain
    """The pod's name."""
    node: NodeName
    """The node on which it runs; the record is in that node's partition."""
    owner_kind: Word | None = None
    """Kind of its top-level workload, such as `Deployment` or `Job`."""
    owner_name: Subdomain | None = None
    """Name of that workload."""
    labels: Labels
    """The labels that the settings select."""
    annotations: Annotations | None = None
    """The annotations that the settings select; absent if the pod has none of them."""
    containers: Annotated[list[PodContainer], at_most(MAX_POD_CONTAINERS)]
    """All containers, including init and ephemeral ones."""
    config_hash: Id | None = None
    """A static pod's hash, which cgroup paths use instead of its UID."""
    phase: Word
    """`Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`."""
    qos_class: Word | None = None
    """`Guaranteed`, `Burstable` or `BestEffort`."""
    requested_cpu_millicores: Natural | None = None
    """CPU that its containers request at the same time, with the overhead of its runtime class."""
    requested_memory_bytes: Natural | None = None
    """Memory, in the same way."""
    priority: Integer | None = None
    """The scheduler's priority."""
    priority_class: Subdomain | None = None
    """Name of its priority class."""
    created_time_ns: Natural
    """When the API server created the object, nanoseconds since the epoch."""
    scheduled_time_ns: Natural | None = None
    """When a scheduler assigned it to its node: the time of the condition `PodScheduled`."""
    started_time_ns: Natural | None = None
    """When the kubelet accepted it."""
    ended_time_ns: Natural | None = None
    """When its last container ended, if all have ended."""
    deletion_time_ns: Natural | None = None
    """When it is to be deleted, including its grace period: `metadata.deletionTimestamp`."""
    deleted_time_ns: Natural | None = None
    """When it disappeared from the API server, as seen by podwatch."""
    resource_version: Word
    """Version of the object, or of the list in which a deleted pod was missing."""


class PendingContainer(BaseRecord, frozen=True, kw_only=True):
    """A container that requests GPUs, in a pod that waits for a node."""

    name: Label
    """The container's name in the pod."""
    kind: Word | None = None
    """`init` or `sidecar` (an init container that is always restarted); absent for ordinary
    containers."""
    requested: ContainerRequest
    """Its request for GPUs."""


class PendingPodRecord(BaseRecord, frozen=True, kw_only=True):
    """A pod that requests GPUs and waits for a node, at one version of its object.

    A change of only the message is not published, because schedulers rewrite it every few seconds.
    Once the pod has a node, `PodRecord` describes it, under the same UID.
    """

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    uid: Id
    """UID of the pod: its identity, even if the name is reused."""
    namespace: Label
    """The pod's namespace."""
    name: Subdomain
    """The pod's name."""
    owner_kind: Word | None = None
    """Kind of its top-level workload, such as `Deployment` or `Job`."""
    owner_name: Subdomain | None = None
    """Name of that workload."""
    labels: Labels
    """The labels that the settings select."""
    containers: Annotated[list[PendingContainer], at_most(MAX_POD_CONTAINERS)]
    """The containers that request GPUs, in the order in which they start."""
    requested_cpu_millicores: Natural | None = None
    """CPU that its containers request at the same time, with the overhead of its runtime class."""
    requested_memory_bytes: Natural | None = None
    """Memory, in the same way."""
    priority: Integer | None = None
    """The scheduler's priority."""
    priority_class: Subdomain | None = None
    """Name of its priority class."""
    queue: Subdomain | None = None
    """The queue of Kueue, Volcano, KAI Scheduler or slurm-bridge that the pod names."""
    scheduling_gates: Annotated[list[QualifiedName], at_most(MAX_SCHEDULING_GATES)] | None = None
    """Names of the gates that keep schedulers from trying; absent if there are none."""
    reason: Word | None = None
    """Why it has no node, such as `Unschedulable` or `SchedulingGated`; absent until a scheduler
    has tried to place it."""
    message: Sentence | None = None
    """The scheduler's explanation when one of the other fields last changed."""
    created_time_ns: Natural
    """When the API server created the object, nanoseconds since the epoch."""
    deletion_time_ns: Natural | None = None
    """When its deletion was requested: `metadata.deletionTimestamp`."""
    left_time_ns: Natural | None = None
    """When it stopped waiting, as seen by podwatch: it got a node, or was deleted."""
    resource_version: Word
    """Version of the object, or of the list in which the pod was missing."""


class NodeRecord(BaseRecord, frozen=True, kw_only=True):
    """A node, at one version of its object in the API server.

    The cloud provider's properties come from labels, which differ by provider.
    """

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    uid: Id
    """UID of the Node object: its identity, even if the name is reused."""
    name: NodeName
    """The node's name; the record is in the same partition as the node's other records."""
    pool: Label | None = None
    """Its node pool or node group."""
    instance_type: Label | None = None
    """The provider's machine type, such as `p5.48xlarge`."""
    zone: Label | None = None
    """The provider's zone."""
    region: Label | None = None
    """The provider's region."""
    capacity_type: Label | None = None
    """How the capacity was bought: `spot`, `on_demand`, `reserved`, or another label value."""
    allocatable_cpu_millicores: Natural | None = None
    """CPU that the node has for pods."""
    allocatable_memory_bytes: Natural | None = None
    """Memory that the node has for pods."""
    allocatable_resources: (
        Annotated[dict[QualifiedName, Natural], at_most(MAX_RESOURCES)] | None
    ) = None
    """GPUs that the node has for pods: amounts by resource name, in the resource's own unit."""
    unschedulable: bool | None = None
    """Whether it is cordoned, so that schedulers place no further pods on it."""
    labels: Labels
    """The labels that the settings select."""
    created_time_ns: Natural
    """When the API server created the object, nanoseconds since the epoch."""
    deletion_time_ns: Natural | None = None
    """When its deletion was requested: `metadata.deletionTimestamp`."""
    deleted_time_ns: Natural | None = None
    """When it disappeared from the API server, as seen by podwatch."""
    resource_version: Word
    """Version of the object, or of the list in which a deleted node was missing."""


class NamespaceRecord(BaseRecord, frozen=True, kw_only=True):
    """A namespace, at one version of its object in the API server."""

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    uid: Id
    """UID of the Namespace object: its identity, even if the name is reused."""
    name: Label
    """The namespace's name."""
    labels: Labels
    """The labels that the settings select."""
    annotations: Annotations | None = None
    """The annotations that the settings select; absent if the namespace has none of them."""
    created_time_ns: Natural
    """When the API server created the object, nanoseconds since the epoch."""
    deletion_time_ns: Natural | None = None
    """When its deletion was requested: `metadata.deletionTimestamp`."""
    deleted_time_ns: Natural | None = None
    """When it disappeared from the API server, as seen by podwatch."""
    resource_version: Word
    """Version of the object, or of the list in which a deleted namespace was missing."""
