"""What a list and a watch of pods yield: from bytes to lines, and from a line to a typed event.

A watch is one JSON object a line, which says `type` and `object`. Some of Kubernetes' traps:

* A line may have any length: a pod has up to 1.5 MB, and a chunk ends anywhere within a line.
* A `BOOKMARK` is no pod, though its object is of that kind: it has a version and nothing else.
* An `ERROR` comes with status 200, since the answer has begun; its object is a `Status`, and 410 in
  it means that the version is too old.
* A pod that cannot be read must not end the watch: the next one would begin at the same pod.

What follows from an event is the reflector's business.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from enum import Enum, auto
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec
import structlog

from enricher.podwatch import pod_metrics
from enricher.podwatch.api import KubernetesError
from enricher.podwatch.decode import HEAD_BYTES, PodOfEvent, PodReader, decode_cut, identity_of
from enricher.podwatch.objects import Status, VersionOnly, WatchEvent
from gpuledger.errors import UndecodableError
from gpuledger.records import PodRecord
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.readiness import Check

# etcd refuses objects above 1.5 MiB by default and nobody runs it with more than a few times that.
MAX_LINE_BYTES: Final = 32 * 2**20
MAX_NAMED: Final = 1000
"""How many pods that cannot be read are remembered at most."""
_decode_event: Final = msgspec.json.Decoder(WatchEvent).decode
_decode_status: Final = msgspec.json.Decoder(Status).decode
_decode_version: Final = msgspec.json.Decoder(VersionOnly).decode
_UNKNOWN: Final = "unknown"
_CHANGES: Final = ("ADDED", "MODIFIED", "DELETED")
# As the API server writes them; a line in another order is read in parts.
_OF_A_POD: Final = tuple(f'{{"type":"{kind}",'.encode() for kind in _CHANGES)
_COUNTERS: Final = {
    kind: pod_metrics.EVENTS.labels(type=kind)
    for kind in (*_CHANGES, "BOOKMARK", "ERROR", _UNKNOWN)
}
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class Phase(Enum):
    """A step that is about no single pod."""

    LISTING = auto()
    """A complete list begins: what is not seen until `LISTED` is gone."""
    LISTED = auto()
    """The list is complete."""
    WATCHING = auto()
    """A watch is open: the server answers."""


class Upserted(NamedTuple):
    """A pod that is new, changed, or only listed again."""

    pod: PodRecord


class Deleted(NamedTuple):
    """A pod that left the API server, in its last state."""

    pod: PodRecord


class Skipped(NamedTuple):
    """A pod whose newest state cannot be read; what was known of it stays known."""

    uid: str
    """Empty where not even that can be found."""
    version: str
    name: str
    """Its namespace and name, as far as they can be found."""
    error: str
    is_deleted: bool = False
    """Whether it left the API server."""


class Interrupted(NamedTuple):
    """What ended a list or a watch; another attempt follows."""

    error: KubernetesError


Step = Phase | Upserted | Deleted | Skipped | Interrupted
"""What the reflector yields."""


class Bookmark(NamedTuple):
    """A version from which to go on, and whether it ends a list that came as a watch."""

    version: str
    ends_list: bool


class Passed(NamedTuple):
    """A version at which something changed that is no pod with a node."""

    version: str


LineEvent = Upserted | Deleted | Skipped | Bookmark | Passed
"""What a line of a watch says."""


class WatchReader:
    """Reads lines, and counts what they were."""

    def __init__(self, reader: PodReader) -> None:
        self._reader = reader

    def read(self, line: bytes) -> LineEvent | None:
        """Return the event of a line; `None` for a type that is not known.

        Raises `KubernetesError` for a line that reports an error, or is no event.
        """
        # Nearly all lines: type and pod are decoded in one go, without a copy of the pod's bytes.
        if line.startswith(_OF_A_POD):
            with suppress(UndecodableError):
                return _counted(self._reader.read_event(line))
        return self._read_in_parts(line)

    def _read_in_parts(self, line: bytes) -> LineEvent | None:
        """Read the type before the object: for all that is no pod as it should be."""
        try:
            event = decode_cut(_decode_event, line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # No JSON, such as the begin of a line that was too long, yet it is known what it was.
            for kind, begin in zip(_CHANGES, _OF_A_POD, strict=True):
                if line.startswith(begin):
                    return _skipped(line, error, kind=kind)
            raise KubernetesError(f"the API server sent no watch event: {error}") from error
        if event.type in _CHANGES:
            try:
                pod = self._reader.read(event.object)
            except UndecodableError as error:
                return _skipped(event.object, error, kind=event.type)
            return _counted(PodOfEvent(event.type, pod, _bookmark(event.object).version))
        (_COUNTERS.get(event.type) or _COUNTERS[_UNKNOWN]).inc()
        match event.type:
            case "BOOKMARK":
                return _bookmark(event.object)
            case "ERROR":
                raise _error_of(event.object)
            case _:
                # A type of a later Kubernetes: stepped over, as its other clients do.
                return None

    def item(self, raw: msgspec.Raw) -> Upserted | Skipped | None:
        """Return the event of a pod in a list, `None` where it has no node."""
        try:
            pod = self._reader.read(raw)
        except UndecodableError as error:
            return _skipped(raw, error)
        return Upserted(pod) if pod else None


def _skipped(data: bytes | msgspec.Raw, error: Exception, *, kind: str | None = None) -> Skipped:
    """Return that a pod cannot be read, counted and logged with its name."""
    if kind:
        _COUNTERS[kind].inc()
    pod_metrics.UNDECODABLE.inc()
    found = identity_of(data)
    if count := _repeats.count("pod"):
        _log.warning(
            "pod_skipped",
            pods=[f"{found.namespace}/{found.name}"],
            error=str(error),
            count=count,
        )
    return Skipped(
        uid=found.uid,
        version=found.resource_version,
        name=f"{found.namespace}/{found.name}",
        error=str(error),
        is_deleted=kind == "DELETED",
    )


def _counted(event: PodOfEvent) -> Upserted | Deleted | Passed:
    _COUNTERS[event.kind].inc()
    if event.pod is None:
        return Passed(event.version)
    return Deleted(event.pod) if event.kind == "DELETED" else Upserted(event.pod)


def _bookmark(raw: msgspec.Raw) -> Bookmark:
    """Read the version alone; empty where the object has none."""
    try:
        meta = decode_cut(_decode_version, raw).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # Nothing is lost by it: the watch only goes on from an earlier version after its end.
        if count := _repeats.count("version"):
            _log.warning("version_skipped", error=str(error), count=count)
        return Bookmark("", ends_list=False)
    notes = meta.annotations
    return Bookmark(
        meta.resource_version, ends_list=notes is not None and notes.initial_events_end == "true"
    )


def _error_of(raw: msgspec.Raw) -> KubernetesError:
    """Return the error that an `ERROR` event reports: the same Status as in an HTTP answer."""
    try:
        status = decode_cut(_decode_status, raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return KubernetesError(f"the watch ended with an error that cannot be read: {error}")
    code = status.code or HTTPStatus.INTERNAL_SERVER_ERROR
    wait = status.details.retry_after_seconds if status.details else None
    return KubernetesError(
        f"the watch ended with {int(code)}: {status.message or status.reason or 'no message'}",
        status=code,
        reason=status.why,
        retry_after_seconds=wait,
    )


async def split_lines(
    chunks: AsyncGenerator[bytes], *, max_bytes: int = MAX_LINE_BYTES
) -> AsyncGenerator[bytes]:
    """Yield each whole line without its end, empty ones left out.

    Of a line longer than `max_bytes` its first `HEAD_BYTES` are yielded, and no more is held: they
    say what it is and whose, though they are no JSON any more. Raises `KubernetesError` where the
    body ends within a line.
    """
    kept: list[bytes] = []
    line_bytes = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            *whole, rest = chunk.split(b"\n")
            for line in whole:
                if line_bytes <= max_bytes:
                    kept.append(line)
                if joined := b"".join(kept):
                    yield joined
                kept.clear()
                line_bytes = 0
            if rest:
                # Kept as pieces and joined once: joined chunk by chunk, a line of megabytes would
                # be copied a hundred times.
                if line_bytes <= max_bytes:
                    kept.append(rest)
                line_bytes += len(rest)
                if line_bytes > max_bytes:
                    kept[:] = [b"".join(kept)[:HEAD_BYTES]]
    if kept:
        # A whole watch ends with a line's end. The next watch repeats what is cut here.
        raise KubernetesError(f"the connection ended within a line, after {line_bytes} bytes of it")


class UnreadablePods:
    """The pods whose newest state cannot be read, as a check; what is known of them stays known.

    Each is remembered until it can be read or is gone.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._pods: dict[str, Skipped] = {}
        check.ok()

    def begin_list(self) -> None:
        """Record that all pods are listed anew."""
        # The check stays as it is until the list ends: it would recover and fail with every list.
        self._pods.clear()

    def add(self, pod: Skipped) -> None:
        """Record that a pod cannot be read."""

        def detail() -> str:
            some = next(iter(self._pods.values()), None)
            if some is None:
                return "the pods are listed again"
            others = len(self._pods) - 1
            return f"pod {some.name} cannot be read, and {others} others: {some.error}"

        if pod.is_deleted:
            self.discard(pod.uid)
        elif len(self._pods) < MAX_NAMED:
            self._pods[pod.uid] = pod
            self._check.failed(detail)

    def discard(self, uid: str) -> None:
        """Record that a pod was read, or is gone."""
        if self._pods.pop(uid, None):
            self.end_list()

    def end_list(self) -> None:
        """Pass the check where all pods can be read: after a list, and when one is read again."""
        if not self._pods:
            self._check.ok()
