"""For how long the conditions of alerts have held on a node, so that `for` goes on over restarts.

Here live the records of `gpuledger.conditions.v1`, a compacted topic keyed by group and node, which
the alerts sink reads when it takes a partition over. It is the sink's own: nobody else needs to
read it.
"""

from typing import Annotated, Final

from gpuledger.records.base import (
    ArrayRecord,
    BaseRecord,
    BootId,
    ClusterName,
    Natural,
    NodeName,
    Seq,
)
from gpuledger.records.bounds import MAX_GPUS, Id, Ratio, Word, at_most

MAX_HELD_CONDITIONS: Final = 2 * MAX_GPUS
"""Of a node: those that hold on each of its GPUs and instances, and on as many before them."""


class HeldCondition(ArrayRecord, frozen=True, kw_only=True):
    """A rule's condition that held on one GPU in the node's last tick."""

    rule: Word
    """The rule's name."""
    threshold: Ratio
    """Its threshold then: under another one it is another condition."""
    gpu_uuid: Id
    """The GPU's UUID."""
    boot_id: BootId
    """The boot in which it was last seen to hold."""
    seq: Seq
    """The last tick of that boot in which it held, or which did not say whether it did."""
    held_ns: Natural
    """What ticks have covered of the time since the first tick in which it held."""
    fired_time_ns: Natural | None = None
    """Since when its alert stands, nanoseconds since the epoch; absent where it has not fired."""


class NodeConditions(BaseRecord, frozen=True, kw_only=True):
    """The conditions that hold on a node, as one group of sinks has seen them."""

    group: Word
    """The consumer group."""
    cluster: ClusterName
    """The Kubernetes cluster."""
    node: NodeName
    """The node's name in Kubernetes."""
    time_ns: Natural
    """Time of the last tick that is counted, nanoseconds since the epoch."""
    conditions: Annotated[list[HeldCondition], at_most(MAX_HELD_CONDITIONS)]
    """The conditions."""
