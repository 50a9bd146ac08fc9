"""Finds who the pods are to whom a node says that the kubelet has given something.

The kubelet's answer names pods and has no UIDs. A name counts only where a pod record of this very
node has it: otherwise a node could put what is idle there on any pod. The books do not change with
what is known here; pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

from enricher.join.pods.pods import PodCache, nearest
from gpuledger.records import NodeSample


class Holders(NamedTuple):
    """Who holds the allocations of a tick, as far as it is known."""

    uids: Sequence[str | None]
    """For each allocation the UID of the pod; `None` where no record of this node has the name."""
    unknown: int
    """How many pods there are of which none has."""
    changes_ns: Sequence[int]
    """When a name passes from one pod to the next."""


_NOBODY = Holders((), 0, ())


def find_holders(sample: NodeSample, pods: PodCache) -> Holders:
    """Return the holders of a tick's allocations by the pods of its node, at the tick's time."""
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
            for one in candidates:
                changes += [one.record.created_time_ns, *one.changes_ns()]
    uids = [found[each.namespace, each.pod] for each in sample.allocations]
    return Holders(uids, sum(uid is None for uid in found.values()), changes)
