"""Says who the pods of an event are, by the pod cache.

Here lives the description's part of an event and of an attributed incident. Books live elsewhere
and do not change with what is known here.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from enricher.join.pods import PodCache
from gpuledger.records import (
    ContainerRef,
    IncidentProcess,
    PodDescription,
    PodRecord,
    PodState,
)
from gpuledger.twins import encode_twin, twin_of

_PodDescription: Final = twin_of(PodDescription)
Identity = tuple[str | None, str | None]


class Said(NamedTuple):
    """What was said of a node's pods, and what it was said of."""

    version: int
    """The cache's version at that time."""
    containers: list[ContainerRef]
    """The containers that were described."""
    pods: msgspec.Raw
    """The descriptions, encoded: from tick to tick they are the same bytes."""
    pending: int
    """How many of them lack the pod's record."""


class DescriptionCache:
    """Remembers what was said of a node's pods until one of them, or who is there, changes.

    From tick to tick the same containers are on a node's GPUs; saying anew who they are would be a
    third of the join's work. Memory is bounded by the nodes.
    """

    def __init__(self, pods: PodCache) -> None:
        self._pods = pods
        self._said: dict[str, Said] = {}

    def clear(self) -> None:
        """Forget everything: after a partition was given up, only its own nodes are asked again."""
        self._said.clear()

    def describe(self, node: str, containers: list[ContainerRef]) -> Said:
        """Describe the pods of a tick's containers."""
        said = self._said.get(node)
        version = self._pods.version
        if said is None or said.version != version or said.containers != containers:
            pods = describe_pods(map(identity_of, containers), self._pods)
            pending = sum(pod.state is PodState.PENDING for pod in pods)
            encoded = msgspec.Raw(encode_twin(pods))
            said = self._said[node] = Said(version, containers, encoded, pending)
        return said


def identity_of(container: ContainerRef | IncidentProcess) -> Identity:
    """Give the pair by which the pod of a container is found."""
    return container.pod_uid, container.container_id


def describe_pods(identities: Iterable[Identity], pods: PodCache) -> list[PodDescription]:
    """Describe each pod once, in an order that depends on the identities alone."""
    containers: dict[str, list[str]] = {}
    records: dict[str, PodRecord] = {}
    unknown: list[PodDescription] = []
    for uid, container_id in sorted(set(identities), key=_as_text):
        if uid is None and container_id is None:
            continue  # the host's
        pod = pods.find(uid, container_id)
        key = pod.uid if pod else uid
        if key is None:
            unknown.append(_pending(None, [container_id] if container_id else []))
            continue
        if pod:
            records[key] = pod
        containers.setdefault(key, []).extend([container_id] if container_id else [])
    known = [
        _known(records[uid], ids) if uid in records else _pending(uid, ids)
        for uid, ids in containers.items()
    ]
    return known + unknown


def _as_text(identity: Identity) -> tuple[str, str]:
    return identity[0] or "", identity[1] or ""


def _pending(uid: str | None, container_ids: list[str]) -> PodDescription:
    return _PodDescription(uid=uid, container_ids=container_ids, state=PodState.PENDING)


def _known(pod: PodRecord, container_ids: list[str]) -> PodDescription:
    names = {
        each.container_id: each.name
        for each in pod.containers
        if each.container_id is not None and each.container_id in container_ids
    }
    return _PodDescription(
        uid=pod.uid,
        container_ids=container_ids,
        state=PodState.KNOWN,
        namespace=pod.namespace,
        name=pod.name,
        owner_kind=pod.owner_kind,
        owner_name=pod.owner_name,
        labels=pod.labels,
        container_names=names,
        deleted_time_ns=pod.deleted_time_ns,
    )
