"""Says who the pods of an event are, by the pod cache.

Here lives the description's part of an event and of an attributed incident. Books live elsewhere
and do not change with what is known here.
"""

from collections.abc import Iterable
from typing import Final

from enricher.join.pods import PodCache
from gpuledger.records import Account, GpuBooks, PodDescription, PodRecord, PodState
from gpuledger.twins import twin_of

_PodDescription: Final = twin_of(PodDescription)
Identity = tuple[str | None, str | None]


def identities_of(books: Iterable[GpuBooks]) -> set[Identity]:
    """Give the (pod UID, container id) pairs on which the books have entries."""
    return {
        (entry.pod_uid, entry.container_id)
        for gpu in books
        for entry in gpu.entries
        if entry.account is Account.POD
    }


class DescriptionCache:
    """Remembers what was said of a node's pods until one of them, or who is there, changes.

    From tick to tick the same containers are on a node's GPUs; saying anew who they are would be a
    third of the join's work. Memory is bounded by the nodes.
    """

    def __init__(self, pods: PodCache) -> None:
        self._pods = pods
        self._said: dict[str, tuple[int, set[Identity], list[PodDescription]]] = {}

    def describe(self, node: str, books: Iterable[GpuBooks]) -> list[PodDescription]:
        """Describe the pods on whom a node's books have entries."""
        identities = identities_of(books)
        version = self._pods.version
        said = self._said.get(node)
        if said is None or said[0] != version or said[1] != identities:
            said = self._said[node] = (version, identities, describe_pods(identities, self._pods))
        return said[2]


def describe_pods(identities: Iterable[Identity], pods: PodCache) -> list[PodDescription]:
    """Describe each pod once, in an order that depends on the identities alone."""
    containers: dict[str, list[str]] = {}
    records: dict[str, PodRecord] = {}
    unknown: list[PodDescription] = []
    for uid, container_id in sorted(identities, key=_as_text):
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
