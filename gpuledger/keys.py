"""The keys of records: what is one on all of Kafka, in all stages, and in memory. Pure.

A name is unique in its cluster alone, so every key begins with that: `<cluster>/<node>` of what a
node says and of the node itself, `<cluster>/<uid>` of a pod, `<cluster>/<namespace>`. The same
texts are the keys of what stages remember of nodes. Neither names of clusters nor of nodes nor UIDs
have a slash, so none is like another's.
"""

from typing import Final, NamedTuple, Protocol

from gpuledger.records.base import DEFAULT_CLUSTER

NAME_SKEW_SECONDS: Final = 60
"""So far the clocks of a node and of the API server may be apart: a pod has its name so long before
it was made."""
NAME_LINGER_SECONDS: Final = 5
"""How long a kubelet may list a pod by its name that the API server has no more."""


class OfNode(Protocol):
    """A record that a node has written, or that is about one."""

    @property
    def cluster(self) -> str:
        """The node's cluster."""

    @property
    def node(self) -> str:
        """The node's name in it."""


class NodeId(NamedTuple):
    """A node, as its agent is told what it is called."""

    cluster: str
    """The node's cluster."""
    node: str
    """The node's name in it."""


def key_in(cluster: str, name: str) -> str:
    """Return the key of what is called so in a cluster: a node, a namespace, or a pod's UID."""
    return f"{cluster}/{name}"


def node_key(record: OfNode) -> str:
    """Return the key of the node that a record is of: by it the record is placed, too."""
    return f"{record.cluster}/{record.node}"


def watermark_key(component: str, cluster: str, partition: int) -> str:
    """Return the key of what a component says of one cluster in one partition of its topic."""
    return f"{component}/{cluster}/{partition}"


def group_key(group: str, node: str) -> str:
    """Return the key of what a consumer group knows of a key's node."""
    return f"{group}/{node}"


def split_key(key: str) -> tuple[str, str]:
    """Return the cluster and the name of a key; of a text that is none, an empty name."""
    cluster, _, name = key.partition("/")
    return cluster, name


def show_node(cluster: str, node: str) -> str:
    """Return how a node is called in texts for people: by its cluster where it has one by name."""
    return node if cluster == DEFAULT_CLUSTER else f"{cluster}/{node}"
