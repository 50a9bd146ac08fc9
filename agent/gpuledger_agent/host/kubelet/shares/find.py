"""Finds the shares that the annotations of all pods of the node state, without I/O."""

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from gpuledger_agent.host.kubelet.pod_list import ListedPod
from gpuledger_agent.host.kubelet.shares.gpushare import GPUSHARE
from gpuledger_agent.host.kubelet.shares.hami import HAMI, VOLCANO
from gpuledger_agent.host.kubelet.shares.kai import KAI, groups_of
from gpuledger_agent.host.kubelet.shares.koordinator import KOORDINATOR
from gpuledger_agent.host.kubelet.shares.stated import (
    MAX_SHARES_OF_POD,
    BadAnnotationError,
    ShareSource,
    StatedShare,
)

SOURCES: Final[Sequence[ShareSource]] = (HAMI, VOLCANO, GPUSHARE, KOORDINATOR, KAI)
"""All supported products. If several apply to a container, the first one's shares come first."""
_ENDED: Final = ("Succeeded", "Failed")

ContainerKey = tuple[str, str, str]
"""A pod's namespace and name, and a container's name."""


@dataclass(frozen=True, kw_only=True)
class StatedPods:
    """The shares of all pods of a node."""

    shares: Mapping[ContainerKey, Mapping[ShareSource, Sequence[StatedShare]]] = field(
        default_factory=dict
    )
    """Each container's shares, by the product that states them."""
    groups: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    """The groups of each reservation pod, by namespace and name."""
    ended: AbstractSet[tuple[str, str]] = frozenset()
    """The namespaces and names of ended pods, unless another pod of that name has not ended."""
    problems: Sequence[str] = ()
    """For each annotation that could not be used: the pod and the reason."""


def find_shares(
    pods: Sequence[ListedPod],
    sources: Sequence[ShareSource],
    *,
    placeholder_namespaces: Collection[str],
) -> StatedPods:
    """Return the shares that the annotations of these pods state.

    Ended pods have none. If several other pods have one name, the newest one counts. Pods in
    `placeholder_namespaces` are reservation pods, so they have groups but no shares.
    """
    found: dict[ContainerKey, dict[ShareSource, list[StatedShare]]] = {}
    groups: dict[tuple[str, str], Sequence[str]] = {}
    problems: list[str] = []
    # The kubelet lists a pod until the pod is deleted, although its containers have ended.
    running = [pod for pod in pods if pod.status.phase not in _ENDED]
    # A pod that is being deleted may have its successor's name.
    newest = {
        _name_of(pod): pod
        for pod in sorted(running, key=lambda pod: pod.metadata.creation_timestamp or "")
    }
    for (namespace, name), pod in newest.items():
        if namespace in placeholder_namespaces:
            groups[namespace, name] = groups_of(pod)
            continue
        for source in sources:
            try:
                shares = source.find(pod)
            except BadAnnotationError as error:
                problems.append(f"pod {namespace}/{name}: {error}")
                continue
            if len(shares) > MAX_SHARES_OF_POD:
                problems.append(
                    f"pod {namespace}/{name}: its annotations state over {MAX_SHARES_OF_POD} shares"
                )
                continue
            for share in shares:
                key = namespace, name, share.container
                found.setdefault(key, {}).setdefault(source, []).append(share)
    ended = {_name_of(pod) for pod in pods} - newest.keys()
    return StatedPods(shares=found, groups=groups, ended=ended, problems=problems)


def _name_of(pod: ListedPod) -> tuple[str, str]:
    return pod.metadata.namespace, pod.metadata.name
