"""What a list and a watch of objects yield: from bytes to lines, and from a line to a typed event.

A watch is one JSON object a line, which says `type` and `object`. Some of Kubernetes' traps:

* A line may have any length: an object has up to 1.5 MB, and a chunk ends anywhere within a line.
* A `BOOKMARK` is no object, though it has one of that kind: it has a version and nothing else.
* An `ERROR` comes with status 200, since the answer has begun; its object is a `Status`, and 410 in
  it means that the version is too old.
* An object that cannot be read must not end the watch: the next one would begin at the same one.

What follows from an event is the reflector's business.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from enum import Enum, auto
from http import HTTPStatus
from typing import Final, Generic, NamedTuple

import msgspec
import structlog

from gpuledger.errors import UndecodableError
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.readiness import Check
from gpuledger_enricher.podwatch import pod_metrics
from gpuledger_enricher.podwatch.api import KubernetesError
from gpuledger_enricher.podwatch.decode import UNREADABLE, ObjectReader, decode_cut, identity_of
from gpuledger_enricher.podwatch.objects import (
    AddedEvent,
    BookmarkEvent,
    DeletedEvent,
    ErrorEvent,
    ModifiedEvent,
    OtherEvent,
    Status,
)
from gpuledger_enricher.watched_records import RecordT

# etcd refuses objects above 1.5 MiB by default and nobody runs it with more than a few times that.
MAX_LINE_BYTES: Final = 32 * 2**20
MAX_NAMED: Final = 1000
"""How many objects that cannot be read are remembered at most."""
_decode_other: Final = msgspec.json.Decoder(OtherEvent).decode
_UNKNOWN: Final = "unknown"
_TYPE_OF: Final[Mapping[type, str]] = {
    AddedEvent: "ADDED",
    ModifiedEvent: "MODIFIED",
    DeletedEvent: "DELETED",
}
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class Phase(Enum):
    """A step that is about no single object."""

    LISTING = auto()
    """A complete list begins: what is not seen until `LISTED` is gone."""
    LISTED = auto()
    """The list is complete."""
    WATCHING = auto()
    """A watch is open: the server answers."""


class Upserted(NamedTuple, Generic[RecordT]):
    """An object that is new, changed, or only listed again."""

    record: RecordT


class Deleted(NamedTuple, Generic[RecordT]):
    """An object that left the API server, in its last state."""

    record: RecordT


class Skipped(NamedTuple):
    """An object whose newest state cannot be read; what was known of it stays known."""

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


Step = Phase | Upserted[RecordT] | Deleted[RecordT] | Skipped | Interrupted
"""What the reflector yields."""


class Bookmark(NamedTuple):
    """A version from which to go on, and whether it ends a list that came as a watch."""

    version: str
    ends_list: bool


class Passed(NamedTuple):
    """A version at which something changed of which there is no record: a pod without a node."""

    version: str


LineEvent = Upserted[RecordT] | Deleted[RecordT] | Skipped | Bookmark | Passed
"""What a line of a watch says."""


class WatchReader(Generic[RecordT]):
    """Reads lines, and counts what they were."""

    def __init__(self, reader: ObjectReader[RecordT], *, kind: str) -> None:
        """`kind` is that of the objects, as in the metrics."""
        self._reader = reader
        self._kind = kind
        self._counters = {
            of: pod_metrics.EVENTS.labels(kind=kind, type=of) for of in pod_metrics.EVENT_TYPES
        }

    def read(self, line: bytes) -> LineEvent[RecordT] | None:
        """Return the event of a line; `None` for a type of a later Kubernetes.

        Raises `KubernetesError` for a line that reports an error, or is no event.
        """
        try:
            event = self._reader.read_line(line)
            if isinstance(event, BookmarkEvent):
                self._counters["BOOKMARK"].inc()
                return _bookmark(event)
            if isinstance(event, ErrorEvent):
                self._counters["ERROR"].inc()
                raise _error_of(event.object)
            record = self._reader.record_of(event.object)
        except UNREADABLE as error:
            return self._read_other(line, error)
        self._counters[_TYPE_OF[type(event)]].inc()
        if record is None:
            return Passed(event.object.metadata.resource_version)
        return Deleted(record) if isinstance(event, DeletedEvent) else Upserted(record)

    def _read_other(self, line: bytes, error: Exception) -> Skipped | None:
        """Read the type and the object's identity alone."""
        try:
            event = decode_cut(_decode_other, line)
        except UNREADABLE:
            raise KubernetesError(f"the API server sent no watch event: {error}") from error
        (self._counters.get(event.type) or self._counters[_UNKNOWN]).inc()
        if event.type in _TYPE_OF.values():
            text = f"not {self._reader.what} in an event: {error}"
            return self._skipped(event.object, text, is_deleted=event.type == "DELETED")
        if event.type == "ERROR":
            raise KubernetesError(f"the watch ended with an error that cannot be read: {error}")
        # A type of a later Kubernetes, or a bookmark without a version: the next watch only goes on
        # from an earlier one.
        return None

    def item(self, raw: msgspec.Raw) -> Upserted[RecordT] | Skipped | None:
        """Return the event of an object in a list, `None` for a pod without a node."""
        try:
            record = self._reader.read(raw)
        except UndecodableError as error:
            return self._skipped(raw, str(error))
        return Upserted(record) if record else None

    def _skipped(self, raw: msgspec.Raw, error: str, *, is_deleted: bool = False) -> Skipped:
        """Return that an object cannot be read, counted and logged with its name."""
        pod_metrics.UNDECODABLE.labels(kind=self._kind).inc()
        found = identity_of(raw)
        # Of a pod nearly always both; nodes and namespaces lie in none.
        name = f"{found.namespace}/{found.name}" if found.namespace else found.name
        if count := _repeats.count(self._kind):
            _log.warning("object_skipped", kind=self._kind, object=name, error=error, count=count)
        return Skipped(
            uid=found.uid,
            version=found.resource_version,
            name=name,
            error=error,
            is_deleted=is_deleted,
        )


def _bookmark(event: BookmarkEvent) -> Bookmark:
    meta = event.object.metadata
    notes = meta.annotations
    return Bookmark(
        meta.resource_version, ends_list=notes is not None and notes.initial_events_end == "true"
    )


def _error_of(status: Status) -> KubernetesError:
    """Return the error that an `ERROR` event reports: the same Status as in an HTTP answer."""
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

    Raises `KubernetesError` for a line longer than `max_bytes`, and where the body ends within one.
    """
    kept: list[bytes] = []
    kept_bytes = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            *whole, rest = chunk.split(b"\n")
            for line in whole:
                kept.append(line)
                if joined := b"".join(kept):
                    yield joined
                kept.clear()
                kept_bytes = 0
            if rest:
                # Kept as pieces and joined once: joined chunk by chunk, a line of megabytes would
                # be copied a hundred times.
                kept.append(rest)
                kept_bytes += len(rest)
                if kept_bytes > max_bytes:
                    raise KubernetesError(f"a line of the watch has over {max_bytes} bytes")
    if kept:
        # A whole watch ends with a line's end. The next watch repeats what is cut here.
        raise KubernetesError(f"the connection ended within a line, after {kept_bytes} bytes of it")


class UnreadableObjects:
    """The objects whose newest state cannot be read, as a check; what was known of them stays so.

    Each is remembered until it can be read or is gone.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._objects: dict[str, Skipped] = {}
        check.ok()

    def begin_list(self) -> None:
        """Record that all objects are listed anew."""
        # The check stays as it is until the list ends: it would recover and fail with every list.
        self._objects.clear()

    def add(self, identity: str, skipped: Skipped) -> None:
        """Record that an object cannot be read."""

        def detail() -> str:
            some = next(iter(self._objects.values()), None)
            if some is None:
                return "they are listed again"
            others = len(self._objects) - 1
            return f"{some.name} cannot be read, and {others} others: {some.error}"

        if skipped.is_deleted:
            self.discard(identity)
        elif len(self._objects) < MAX_NAMED:
            self._objects[identity] = skipped
            self._check.failed(detail)

    def discard(self, identity: str) -> None:
        """Record that an object was read, or is gone."""
        if self._objects.pop(identity, None):
            self.end_list()

    def end_list(self) -> None:
        """Pass the check where all can be read: after a list, and when one is read again."""
        if not self._objects:
            self._check.ok()
