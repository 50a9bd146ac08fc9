"""From the API server's bytes to a slim `PodRecord`. Pure; an odd pod is an error, never a guess.

Records are small and the garbage collector never visits them, so that a hundred thousand of them
can be kept.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import intern
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
from msgspec import Raw

from enricher.podwatch.interning import Shared, Times, same
from enricher.podwatch.objects import (
    Annotations,
    ApiContainer,
    ApiPod,
    IdentityMeta,
    IdentityOnly,
    OwnerReference,
    PodSpec,
    PodStatus,
    PodWatchEvent,
    Quantity,
)
from enricher.podwatch.pod_facts import ChosenAnnotations, containers_of, known_owner, last_end_ns
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


# JSON nested deeper than a decoder follows, cut where nobody reads. Pure.
#
# A decoder walks also through what it steps over, and gives up at Python's recursion limit. The API
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


# Which pods are the mirrors of static pods, and by which hash cgroup paths call those. Pure.
#
# A static pod is the kubelet's own: it runs under a UID that the kubelet made of its manifest, and
# in the API server it has a mirror, which says that UID in two annotations. Whoever may create pods
# may write those annotations on any pod, and so would get the name of another one's use. A mirror
# is known by all that a kubelet makes it with: both annotations, alike; the Node as its owner; and
# no service account, which the API server gives to every pod but a mirror. What that leaves to
# somebody hostile is said in docs/security.md.

MAX_HASH_LENGTH: Final = 64
"""A kubelet's hash has 32 characters, and a UID that a manifest gives 36."""


def mirrored_hash(
    notes: Annotations, spec: PodSpec, owners: Sequence[OwnerReference] | None
) -> str | None:
    """Return the hash of the static pod whose mirror this is; `None` where it is none."""
    name = notes.config_hash
    if not name or name != notes.config_mirror or len(name) > MAX_HASH_LENGTH:
        return None
    if spec.service_account_name or not owners or len(owners) != 1:
        return None
    (owner,) = owners
    is_node = owner.kind == "Node" and owner.api_version == "v1"
    return name if is_node and owner.name == spec.node_name else None


# How many GPUs a pod asks for, by resource name. Pure.

_SUFFIXES: Final = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def gpus_requested(spec: PodSpec, prefixes: tuple[str, ...]) -> dict[str, int]:
    """Return what the pod holds at most at a time, as the scheduler counts it.

    Containers run side by side, together with the init containers that are restarted always; the
    other init containers run alone before them.
    """
    inits = spec.init_containers or []
    beside = [one for one in inits if one.restart_policy == "Always"]
    total = _sum([*(spec.containers or []), *beside], prefixes)
    for alone in inits:
        total |= _sum([alone], prefixes)
    return dict(total)


def _sum(containers: Sequence[ApiContainer], prefixes: tuple[str, ...]) -> Counter[str]:
    total: Counter[str] = Counter()
    for container in containers:
        for name, amount in _amounts(container, prefixes):
            total[name] += amount
    return total


def _amounts(container: ApiContainer, prefixes: tuple[str, ...]) -> Iterable[tuple[str, int]]:
    """Yield a container's requests; devices cannot be overcommitted, so a limit is one as well."""
    resources = container.resources
    if resources is None:
        return
    for name, quantity in {**(resources.limits or {}), **(resources.requests or {})}.items():
        if name.startswith(prefixes) and (amount := parse_quantity(quantity)):
            yield name, amount


def parse_quantity(quantity: Quantity) -> int:
    """Read a whole Kubernetes quantity such as `2` or `1k`; 0 for what is none."""
    text = str(quantity)
    digits = text.rstrip("kMGi")
    if not (digits.isascii() and digits.isdigit()):
        return 0
    suffix = text[len(digits) :]
    return int(digits) * (_SUFFIXES.get(suffix, 0) if suffix else 1)


# Which pod it is that cannot be read: by decoding that alone, else by looking at its begin. Pure.
#
# The API server writes name, namespace, UID and version first, before anything that a tenant
# writes.

HEAD_BYTES: Final = 4096
_decode: Final = msgspec.json.Decoder(IdentityOnly).decode
_METADATA: Final = b'"metadata"'


def identity_of(data: bytes | Raw) -> IdentityMeta:
    """Return what can be found of which pod JSON tells; what cannot is empty."""
    try:
        return decode_cut(_decode, data).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _found_in(bytes(data)[:HEAD_BYTES])


def _found_in(head: bytes) -> IdentityMeta:
    metadata = head.partition(_METADATA)[2]
    return IdentityMeta(
        uid=_value(metadata, b"uid"),
        name=_value(metadata, b"name"),
        namespace=_value(metadata, b"namespace"),
        resource_version=_value(metadata, b"resourceVersion"),
    )


def _value(metadata: bytes, name: bytes) -> str:
    found = re.search(rb'"' + name + rb'":\s*"([A-Za-z0-9.-]{1,253})"', metadata)
    return found[1].decode() if found else ""
