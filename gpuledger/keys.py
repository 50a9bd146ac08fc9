"""The keys of nodes, pods and namespaces, for records on Kafka and for data in memory.

A name is unique only within its cluster, so every key begins with the cluster: `<cluster>/<node>`
for a node and its records, `<cluster>/<uid>` for a pod, `<cluster>/<namespace>`. Components use the
same keys for data about nodes in memory. Names of clusters and nodes and UIDs contain no slash, so
keys are unambiguous.
"""

from typing import Final, NamedTuple, Protocol

from gpuledger.records.base import DEFAULT_CLUSTER

NAME_SKEW_SECONDS: Final = 60
"""Maximum difference between the clocks of a node and the API server. By the node's clock, a pod
may be in use this long before its creation time."""
NAME_LINGER_SECONDS: Final = 5
"""How long a kubelet may still list a pod by name after it has left the API server."""


class OfNode(Protocol):
    """A record that a node sent, or that is about a node."""

    @property
    def cluster(self) -> str:
        """The node's cluster."""

    @property
    def node(self) -> str:
        """The node's name within its cluster."""


class NodeId(NamedTuple):
    """A node, identified by the cluster and node names in its agent's settings."""

    cluster: str
    """The node's cluster."""
    node: str
    """The node's name within its cluster."""


def key_in(cluster: str, name: str) -> str:
    """Return the key for a node's name, a namespace's name or a pod's UID in a cluster."""
    return f"{cluster}/{name}"


def node_key(record: OfNode) -> str:
    """Return the key of a record's node, which also determines the record's partition."""
    return f"{record.cluster}/{record.node}"


def watermark_key(component: str, cluster: str, partition: int) -> str:
    """Return the key of a component's watermark for one cluster in one partition of its topic."""
    return f"{component}/{cluster}/{partition}"


def group_key(group: str, node: str) -> str:
    """Return the key under which a consumer group stores its state of a node.

    `node` is the node's key.
    """
    return f"{group}/{node}"


def split_key(key: str) -> tuple[str, str]:
    """Return the cluster and the name in a key; the name is empty if the text is not a key."""
    cluster, _, name = key.partition("/")
    return cluster, name


def show_node(cluster: str, node: str) -> str:
    """Return a node's name for people, with the cluster unless it is the default cluster."""
    return node if cluster == DEFAULT_CLUSTER else f"{cluster}/{node}"
