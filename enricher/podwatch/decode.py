"""From the API server's bytes to a slim `PodRecord`. Pure; an odd pod is an error, never a guess.

Records are made as their fast twins: small, and never looked at by the garbage collector, so that
a hundred thousand of them can be kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from sys import intern
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Raw

from enricher.podwatch.objects import Container, ContainerStatus, Pod, PodSpec, PodStatus
from enricher.podwatch.owners import known_owner
from enricher.podwatch.requests import gpus_requested
from enricher.podwatch.settings import ALL_LABELS
from gpuledger.errors import UndecodableError
from gpuledger.records import PodContainer, PodRecord
from gpuledger.twins import twin_of

V = TypeVar("V")
_MOST_SHARED: Final = 10_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_NO_SPEC: Final = PodSpec()
_NO_STATUS: Final = PodStatus()
_Record: Final = twin_of(PodRecord)
_Container: Final = twin_of(PodContainer)
_decode_pod: Final = msgspec.json.Decoder(Pod).decode


class PodReader:
    """Reads pods, with the labels and the GPU resources that the settings ask for."""

    def __init__(self, *, labels: Iterable[str], gpu_resource_prefixes: Iterable[str]) -> None:
        self._labels = tuple(labels)
        self._all_labels = ALL_LABELS in self._labels
        self._prefixes = tuple(gpu_resource_prefixes)
        self._shared_labels: Shared[str] = Shared()
        self._shared_requests: Shared[int] = Shared()

    def read(self, data: bytes | Raw) -> PodRecord | None:
        """Give the record of a pod, `None` where it has no node yet.

        Raises `UndecodableError` for what is no pod.
        """
        try:
            pod = _decode_pod(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UndecodableError(f"not a pod as the API server describes it: {error}") from error
        if not pod.metadata.uid:
            raise UndecodableError(
                "not a pod as the API server describes it: metadata.uid is empty"
            )
        return self._record(pod)

    def _record(self, pod: Pod) -> PodRecord | None:
        meta, spec, status = pod.metadata, pod.spec or _NO_SPEC, pod.status or _NO_STATUS
        if not spec.node_name:
            return None
        labels = meta.labels or {}
        created_time_ns = _nanoseconds(meta.creation_timestamp) or 0
        owner_kind, owner_name = known_owner(
            meta.owner_references, labels, created_time_ns=created_time_ns
        )
        notes = meta.annotations
        return _Record(
            uid=meta.uid,
            namespace=intern(meta.namespace),
            name=meta.name,
            node=intern(spec.node_name),
            owner_kind=owner_kind and intern(owner_kind),
            owner_name=owner_name and intern(owner_name),
            labels=self._shared_labels.of(self._chosen(labels)),
            containers=_containers(spec, status),
            config_hash=(notes.config_hash or notes.config_mirror) if notes else None,
            gpus_requested=self._shared_requests.of(gpus_requested(spec, self._prefixes)),
            phase=intern(status.phase or "Unknown"),
            created_time_ns=created_time_ns,
            started_time_ns=_nanoseconds(status.start_time),
            resource_version=meta.resource_version,
        )

    def _chosen(self, labels: Mapping[str, str]) -> dict[str, str]:
        wanted = labels if self._all_labels else [name for name in self._labels if name in labels]
        return {intern(name): intern(labels[name]) for name in wanted}


class Shared(Generic[V]):
    """One dictionary for all that are equal; pods of a workload have the same labels and requests.

    Nobody changes a record, so they can be the same object; it saves a quarter of the memory.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, V], ...], dict[str, V]] = {}

    def of(self, items: dict[str, V]) -> dict[str, V]:
        """Give an equal dictionary, the same one each time while it is remembered."""
        if len(self._known) >= _MOST_SHARED:
            self._known.clear()
        return self._known.setdefault(tuple(items.items()), items)


def _containers(spec: PodSpec, status: PodStatus) -> list[PodContainer]:
    """Give the containers of all three kinds: as their status names them, else as asked for."""
    return [
        *_of_one_kind(spec.init_containers, status.init_container_statuses),
        *_of_one_kind(spec.containers, status.container_statuses),
        *_of_one_kind(spec.ephemeral_containers, status.ephemeral_container_statuses),
    ]


def _of_one_kind(
    asked: Sequence[Container] | None, running: Sequence[ContainerStatus] | None
) -> list[PodContainer]:
    by_name = {one.name: one for one in running or ()}
    names = dict.fromkeys(one.name for one in asked or ()) | dict.fromkeys(by_name)
    return [_container(name, by_name.get(name)) for name in names]


def _container(name: str, status: ContainerStatus | None) -> PodContainer:
    if status is None:
        return _Container(name=intern(name), restarts=0)
    return _Container(
        name=intern(name),
        container_id=_without_scheme(status.container_id),
        restarts=status.restart_count,
    )


def _without_scheme(container_id: str | None) -> str | None:
    """Give the id alone: `containerd://4f…` becomes `4f…`; none where nothing was started."""
    return container_id.rpartition("://")[2] or None if container_id else None


def _nanoseconds(time: datetime | None) -> int | None:
    return None if time is None else (time - _EPOCH) // _MICROSECOND * 1000
