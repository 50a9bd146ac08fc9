"""From the API server's bytes to a slim `PodRecord`. Pure; an odd pod is an error, never a guess.

Records are small and the garbage collector never visits them, so that a hundred thousand of them
can be kept. What many have in common is kept once: nobody changes a record, so records can hold the
same dictionary, and pods of a workload have the same labels and requests. That, and times read
once, saves a quarter of the memory.

Here are, in this order, what is shared, the reader of pods, and what is done with bytes that it
cannot read: JSON that is nested too deep is cut, and of any other pod at least its name is found.
"""

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from sys import intern
from typing import Annotated, Any, Final, NamedTuple, TypeVar, cast

import msgspec
from msgspec import Meta, Raw

from enricher.pod_sharing import Shared, same
from enricher.podwatch.objects import (
    Annotations,
    ApiPod,
    IdentityMeta,
    IdentityOnly,
    PodSpec,
    PodStatus,
    PodWatchEvent,
)
from enricher.podwatch.pod_facts import (
    ChosenAnnotations,
    containers_of,
    gpus_requested,
    known_owner,
    last_end_ns,
    mirrored_hash,
)
from enricher.podwatch.pod_settings import ALL_LABELS
from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UndecodableError
from gpuledger.records import PodRecord

T = TypeVar("T")
# When it is full it is emptied: what is in use is read again.
_MAX_TIMES: Final = 2_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# A grace period may be centuries; a record's times end in the year 2262.
_LAST_NS: Final = 2**63 - 1
_Time = Annotated[datetime, Meta(tz=True)]


class Times:
    """Reads the API server's times; they have whole seconds, so many are the same."""

    def __init__(self) -> None:
        self._known: dict[str, int | None] = {}

    def nanoseconds(self, text: str | None) -> int | None:
        """Return nanoseconds since the epoch; `msgspec.ValidationError` for what is no time.

        The epoch itself is what the kubelet writes where the runtime knows no time.
        """
        if not text:
            return None
        if text not in self._known:
            if len(self._known) >= _MAX_TIMES:
                self._known.clear()
            # In integers: a float has no nanoseconds of today.
            since = msgspec.convert(text, _Time) - _EPOCH
            time_ns = (
                since.days * 86_400 + since.seconds
            ) * NS_PER_SECOND + since.microseconds * 1000
            self._known[text] = min(time_ns, _LAST_NS) if time_ns > 0 else None
        return self._known[text]


_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError)
_NO_SPEC: Final = PodSpec()
_NO_STATUS: Final = PodStatus()
_OVER: Final = frozenset({"Succeeded", "Failed"})


class PodOfEvent(NamedTuple):
    """A line of a watch about a pod; `pod` is `None` where it has no node."""

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
        """Read the line of a watch about a pod, in one pass over its bytes.

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
        wanted = labels if self._all_labels else [name for name in self._labels if name in labels]
        chosen = self._annotations.of(notes) if notes else None
        created_time_ns = self._nanoseconds(meta.creation_timestamp) or 0
        owner_kind, owner_name = known_owner(
            meta.owner_references, labels, created_time_ns=created_time_ns
        )
        containers = containers_of(spec, status, self._nanoseconds)
        # Else a container may be started again, and the pod has not ended with its last one.
        is_over = status.phase in _OVER or meta.deletion_timestamp is not None
        return PodRecord(
            uid=meta.uid,
            namespace=intern(meta.namespace),
            name=meta.name,
            node=intern(spec.node_name),
            owner_kind=owner_kind and intern(owner_kind),
            owner_name=owner_name and intern(owner_name),
            labels=self._shared_labels.of({intern(name): intern(labels[name]) for name in wanted}),
            # Most pods have none of those that are wanted: then none, and no empty dictionary.
            annotations=self._shared_annotations.of(chosen) if chosen else None,
            containers=containers,
            config_hash=mirrored_hash(notes, spec, meta.owner_references) if notes else None,
            gpus_requested=self._shared_requests.of(gpus_requested(spec, self._prefixes)),
            phase=intern(status.phase or "Unknown"),
            qos_class=intern(status.qos_class) if status.qos_class else None,
            priority=same(spec.priority),
            priority_class=intern(spec.priority_class_name) if spec.priority_class_name else None,
            created_time_ns=created_time_ns,
            started_time_ns=self._nanoseconds(status.start_time),
            ended_time_ns=last_end_ns(containers) if is_over else None,
            deletion_time_ns=self._nanoseconds(meta.deletion_timestamp),
            resource_version=meta.resource_version,
        )


def _reading(kind: type[T], annotations: type[Annotations]) -> type[T]:
    """Return the struct of a pod, or of its event, of whose annotations these are read."""
    return cast("type[T]", cast("Any", kind)[annotations])


# JSON nested deeper than a decoder follows, cut where nobody reads. Pure.
#
# A decoder parses also what it steps over, and gives up at Python's recursion limit. The API
# server stores some 10,000 levels (of `managedFields`, which any tenant may write); of all that is
# read here nothing lies deeper than ten.

MAX_DEPTH: Final = 64
# A string, whose brackets are none, a bracket, or the begin of a string without end. Possessive, so
# that no input is looked at twice.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]|"', re.DOTALL)
_OPENING: Final = b"[{"
_CLOSING: Final = b"]}"


def decode_cut(decode: Callable[[bytes | Raw], T], data: bytes | Raw) -> T:
    """Return what `decode` makes of JSON, cut first where it is too deep for it."""
    try:
        return decode(data)
    except RecursionError:
        return decode(cut(bytes(data)))


def cut(data: bytes, *, max_depth: int = MAX_DEPTH) -> bytes:
    """Return JSON with `null` for each array or object that lies deeper than `max_depth`.

    What is no JSON is none afterwards.
    """
    parts = []
    kept_to = depth = 0
    for token in _TOKEN.finditer(data):
        bracket = data[token.start()]
        if bracket in _OPENING:
            depth += 1
            if depth == max_depth + 1:
                parts.append(data[kept_to : token.start()])
        elif bracket in _CLOSING:
            if depth == max_depth + 1:
                parts.append(b"null")
                kept_to = token.end()
            depth -= 1
        elif token.end() - token.start() == 1:
            break
    return b"".join(parts) if depth > max_depth else b"".join([*parts, data[kept_to:]])


# Which pod it is that cannot be read: by decoding that alone, else by looking at its begin. Pure.
#
# The API server writes name, namespace, UID and version first, before anything that a tenant
# writes.

HEAD_BYTES: Final = 4096
_decode_identity: Final = msgspec.json.Decoder(IdentityOnly).decode
_METADATA: Final = b'"metadata"'


def identity_of(data: bytes | Raw) -> IdentityMeta:
    """Return what can be found of which pod it is in JSON; what cannot is empty."""
    try:
        return decode_cut(_decode_identity, data).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError):
        metadata = bytes(data)[:HEAD_BYTES].partition(_METADATA)[2]

    def find(name: bytes) -> str:
        # The characters of names, UIDs and versions alone: it goes into logs and checks.
        found = re.search(rb'"' + name + rb'":\s*"([A-Za-z0-9.-]{1,253})"', metadata)
        return found[1].decode() if found else ""

    return IdentityMeta(
        uid=find(b"uid"),
        name=find(b"name"),
        namespace=find(b"namespace"),
        resource_version=find(b"resourceVersion"),
    )
