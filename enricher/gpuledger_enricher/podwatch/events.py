"""Reads the results of lists and watches: from bytes to lines, and from lines to typed events.

A watch returns one JSON object per line, with `type` and `object`. Some pitfalls of Kubernetes:

* A line may have any length: an object has up to 1.5 MB, and a chunk may end anywhere in a line.
* A `BOOKMARK` does not describe an object, although it contains one: only its version counts.
* An `ERROR` comes with status 200, because the response has already begun. Its object is a
  `Status`, and the code 410 means that the version is too old.
* An object that cannot be read must not end the watch, because the next watch would begin with the
  same object.

The reflector reacts to the events.
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

# etcd rejects objects above 1.5 MiB by default; in practice, the limit is at most a few times this.
MAX_LINE_BYTES: Final = 32 * 2**20
MAX_NAMED: Final = 1000
"""Maximum number of unreadable objects that are remembered."""
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
    """A step that does not concern a single object."""

    LISTING = auto()
    """A complete list begins: known objects that do not come before `LISTED` are deleted."""
    LISTED = auto()
    """The list is complete."""
    WATCHING = auto()
    """A watch is open, so the server is available."""


class Upserted(NamedTuple, Generic[RecordT]):
    """An object that is new, has changed, or was listed again."""

    record: RecordT


class Deleted(NamedTuple, Generic[RecordT]):
    """An object that was deleted from the API server, in its last state."""

    record: RecordT


class Skipped(NamedTuple):
    """An object whose newest state cannot be read; its last readable state stays in use."""

    uid: str
    """The object's UID; empty if the UID cannot be read."""
    version: str
    name: str
    """The object's namespace and name, as far as they can be read."""
    error: str
    is_deleted: bool = False
    """Whether the object was deleted from the API server."""


class Interrupted(NamedTuple):
    """The error that ended a list or a watch; another attempt follows."""

    error: KubernetesError


Step = Phase | Upserted[RecordT] | Deleted[RecordT] | Skipped | Interrupted
"""A step of the reflector."""


class Bookmark(NamedTuple):
    """A version from which a watch can resume; may also mark the end of a watch's initial list."""

    version: str
    ends_list: bool


class Passed(NamedTuple):
    """The version of a change of a pod without a record."""

    version: str


LineEvent = Upserted[RecordT] | Deleted[RecordT] | Skipped | Bookmark | Passed
"""The event in a line of a watch."""


class WatchReader(Generic[RecordT]):
    """Reads lines of a watch, and counts them by type."""

    def __init__(self, reader: ObjectReader[RecordT], *, kind: str) -> None:
        """`kind` is the value of the label `kind` in the metrics."""
        self._reader = reader
        self._kind = kind
        self._counters = {
            of: pod_metrics.EVENTS.labels(kind=kind, type=of) for of in pod_metrics.EVENT_TYPES
        }

    def read(self, line: bytes) -> LineEvent[RecordT] | None:
        """Return the event of a line; `None` if its type is unknown.

        Raise `KubernetesError` if the line reports an error or is not an event.
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
        """Read only the type and the object's identity.

        Return `None` if the line can be ignored. Raise `KubernetesError` if it is invalid or
        reports an error.
        """
        try:
            event = decode_cut(_decode_other, line)
        except UNREADABLE:
            raise KubernetesError(f"the API server sent an invalid watch event: {error}") from error
        (self._counters.get(event.type) or self._counters[_UNKNOWN]).inc()
        if event.type in _TYPE_OF.values():
            text = f"not {self._reader.what} in an event: {error}"
            return self._skipped(event.object, text, is_deleted=event.type == "DELETED")
        if event.type == "ERROR":
            raise KubernetesError(f"the watch ended with an unreadable error: {error}")
        # An unknown type, or a bookmark without a version. Without the bookmark, the next watch
        # resumes from an earlier version.
        return None

    def item(self, raw: msgspec.Raw) -> Upserted[RecordT] | Skipped | None:
        """Return the event of an object in a list; `None` for a pod that has no record."""
        try:
            record = self._reader.read(raw)
        except UndecodableError as error:
            return self._skipped(raw, str(error))
        return Upserted(record) if record else None

    def _skipped(self, raw: msgspec.Raw, error: str, *, is_deleted: bool = False) -> Skipped:
        """Count and log an object that cannot be read; return the step for it."""
        pod_metrics.UNDECODABLE.labels(kind=self._kind).inc()
        found = identity_of(raw)
        # Pods nearly always have a namespace and a name; nodes and namespaces have only a name.
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
    """Return the error in an `ERROR` event, whose Status has the form of an HTTP error's body."""
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
    """Yield each whole line without its line break; skip empty lines.

    Raise `KubernetesError` for a line longer than `max_bytes`, and if the body ends within a line.
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
                # Pieces are joined once, at the end of the line. Otherwise a line of megabytes
                # would be copied a hundred times.
                kept.append(rest)
                kept_bytes += len(rest)
                if kept_bytes > max_bytes:
                    raise KubernetesError(f"a line of the watch has more than {max_bytes} bytes")
    if kept:
        # A complete watch ends with a line break. The next watch repeats the truncated line.
        raise KubernetesError(f"the connection ended within a line, after {kept_bytes} bytes")


class UnreadableObjects:
    """Fails a check while the newest state of any object cannot be read.

    The last readable states of these objects stay in use. Each object is remembered until it can be
    read or is deleted.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._objects: dict[str, Skipped] = {}
        check.ok()

    def begin_list(self) -> None:
        """Record that a complete list begins, in which all objects come again."""
        # The check is unchanged until the list ends; otherwise it would recover and fail with each
        # list.
        self._objects.clear()

    def add(self, identity: str, skipped: Skipped) -> None:
        """Remember an object that cannot be read, or forget the object if it was deleted."""

        def detail() -> str:
            some = next(iter(self._objects.values()), None)
            if some is None:
                return "the objects are listed again"
            others = len(self._objects) - 1
            return f"cannot read {some.name} and {others} others: {some.error}"

        if skipped.is_deleted:
            self.discard(identity)
        elif len(self._objects) < MAX_NAMED:
            self._objects[identity] = skipped
            self._check.failed(detail)

    def discard(self, identity: str) -> None:
        """Forget an unreadable object, because it was read successfully or was deleted."""
        if self._objects.pop(identity, None):
            self.end_list()

    def end_list(self) -> None:
        """Pass the check if all objects can be read. Must be called after each list."""
        if not self._objects:
            self._check.ok()
