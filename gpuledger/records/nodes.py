"""Nodes and namespaces, slim: what says where work ran and whose it is beside the pod itself.

Here live the records of `gpuledger.nodes.v1` and `gpuledger.namespaces.v1`, compacted topics keyed
by the object's UID: an object that is made anew under its name is another one.
"""

from gpuledger.records.base import BaseRecord, Natural, NodeName
from gpuledger.records.bounds import Annotations, Id, Label, Labels, Word


class NodeRecord(BaseRecord, frozen=True, kw_only=True):
    """A node, at one version of its object in the API server.

    What its provider says of it is taken from labels, of which each provider has its own.
    """

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
