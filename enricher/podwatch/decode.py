"""From the API server's bytes to a slim `PodRecord`. Pure; an odd pod is an error, never a guess.

Records are small and the garbage collector never visits them, so that a hundred thousand of them
can be kept.
"""

from collections.abc import Iterable, Mapping
from sys import intern
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
from msgspec import Raw

from enricher.podwatch.annotations import ChosenAnnotations
from enricher.podwatch.containers import containers_of, last_end_ns
from enricher.podwatch.depth import decode_cut
from enricher.podwatch.gpu_requests import gpus_requested
from enricher.podwatch.interning import Shared, Times, same
from enricher.podwatch.mirrors import mirrored_hash
from enricher.podwatch.objects import Annotations, ApiPod, PodSpec, PodStatus, PodWatchEvent
from enricher.podwatch.owners import known_owner
from enricher.podwatch.settings import ALL_LABELS
from gpuledger.errors import UndecodableError
from gpuledger.records import PodRecord

T = TypeVar("T")
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError)
_NO_SPEC: Final = PodSpec()
_NO_STATUS: Final = PodStatus()
_OVER: Final = frozenset({"Succeeded", "Failed"})


class PodOfEvent(NamedTuple):
    """What a line of a watch tells of a pod; `pod` is `None` where it has no node."""

    kind: str
    pod: PodRecord | None
    version: str


class PodReader:
    """Reads pods, with the labels, annotations and GPU resources that the settings ask for."""

    def __init__(
        self,
        *,
        labels: Iterable[str],
        gpu_resource_prefixes: Iterable[str],
        annotations: Iterable[str] = (),
    ) -> None:
        self._labels = tuple(labels)
        self._all_labels = ALL_LABELS in self._labels
        self._prefixes = tuple(gpu_resource_prefixes)
        self._annotations = ChosenAnnotations(annotations)
        self._shared_labels: Shared[str] = Shared()
        self._shared_annotations: Shared[str] = Shared()
        self._shared_requests: Shared[int] = Shared()
        self._nanoseconds = Times().nanoseconds
        struct = self._annotations.struct
        self._decode = msgspec.json.Decoder(_reading(ApiPod, struct)).decode
        self._decode_event = msgspec.json.Decoder(_reading(PodWatchEvent, struct)).decode

    def read(self, data: bytes | Raw) -> PodRecord | None:
        """Return the record of a pod, `None` where it has no node yet.

        Raises `UndecodableError` for what is no pod.
        """
        try:
            return self._record(decode_cut(self._decode, data))
        except _UNREADABLE as error:
            raise UndecodableError(f"not a pod as the API server describes it: {error}") from error

    def read_event(self, line: bytes) -> PodOfEvent:
        """Read the line of a watch that tells of a pod, without looking at its bytes twice.

        Raises `UndecodableError` for what is no such line.
        """
        try:
            event = decode_cut(self._decode_event, line)
            pod = self._record(event.object)
        except _UNREADABLE as error:
            raise UndecodableError(f"not a pod's event: {error}") from error
        return PodOfEvent(event.type, pod, event.object.metadata.resource_version)

    def _record(self, pod: ApiPod[Annotations]) -> PodRecord | None:
        meta, spec, status = pod.metadata, pod.spec or _NO_SPEC, pod.status or _NO_STATUS
        if not meta.uid:
            raise msgspec.ValidationError("metadata.uid is empty")
        if not spec.node_name:
            return None
        labels, notes = meta.labels or {}, meta.annotations
        created_time_ns = self._nanoseconds(meta.creation_timestamp) or 0
        owner_kind, owner_name = known_owner(
            meta.owner_references, labels, created_time_ns=created_time_ns
        )
        containers = containers_of(spec, status, self._nanoseconds)
        return PodRecord(
            uid=meta.uid,
            namespace=intern(meta.namespace),
            name=meta.name,
            node=intern(spec.node_name),
            owner_kind=owner_kind and intern(owner_kind),
            owner_name=owner_name and intern(owner_name),
            labels=self._shared_labels.of(self._chosen(labels)),
            annotations=self._noted(notes) if notes else None,
            containers=containers,
            config_hash=mirrored_hash(notes, spec, meta.owner_references) if notes else None,
            gpus_requested=self._shared_requests.of(gpus_requested(spec, self._prefixes)),
            phase=intern(status.phase or "Unknown"),
            qos_class=intern(status.qos_class) if status.qos_class else None,
            priority=same(spec.priority),
            priority_class=intern(spec.priority_class_name) if spec.priority_class_name else None,
            created_time_ns=created_time_ns,
            started_time_ns=self._nanoseconds(status.start_time),
            ended_time_ns=last_end_ns(containers) if _is_over(pod) else None,
            deletion_time_ns=self._nanoseconds(meta.deletion_timestamp),
            resource_version=meta.resource_version,
        )

    def _chosen(self, labels: Mapping[str, str]) -> dict[str, str]:
        wanted = labels if self._all_labels else [name for name in self._labels if name in labels]
        return {intern(name): intern(labels[name]) for name in wanted}

    def _noted(self, notes: Annotations) -> dict[str, str] | None:
        found = self._annotations.of(notes)
        return self._shared_annotations.of(found) if found else None


def _reading(kind: type[T], annotations: type[Annotations]) -> type[T]:
    """Return the struct of a pod, or of its event, of whose annotations these are read."""
    return cast("type[T]", cast("Any", kind)[annotations])


def _is_over(pod: ApiPod[Annotations]) -> bool:
    """Whether no container of the pod will be started again."""
    phase = pod.status.phase if pod.status else None
    return phase in _OVER or pod.metadata.deletion_timestamp is not None
