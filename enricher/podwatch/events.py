"""From a line of a watch to what it tells. What to make of that is the reflector's business."""

from contextlib import suppress
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec
import structlog

from enricher.podwatch import metrics
from enricher.podwatch.api import KubernetesError
from enricher.podwatch.decode import PodOfEvent, PodReader
from enricher.podwatch.depth import decode_cut
from enricher.podwatch.identity import identity_of
from enricher.podwatch.objects import Status, VersionOnly, WatchEvent
from enricher.podwatch.watch_events import Deleted, Skipped, Upserted
from gpuledger.errors import UndecodableError
from gpuledger.runtime.repeats import Repeats

_decode_event: Final = msgspec.json.Decoder(WatchEvent).decode
_decode_status: Final = msgspec.json.Decoder(Status).decode
_decode_version: Final = msgspec.json.Decoder(VersionOnly).decode
_UNKNOWN: Final = "unknown"
_CHANGES: Final = ("ADDED", "MODIFIED", "DELETED")
# As the API server writes them; a line in another order is read in parts.
_OF_A_POD: Final = tuple(f'{{"type":"{kind}",'.encode() for kind in _CHANGES)
_COUNTERS: Final = {
    kind: metrics.EVENTS.labels(type=kind) for kind in (*_CHANGES, "BOOKMARK", "ERROR", _UNKNOWN)
}
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class Bookmark(NamedTuple):
    """A version from which to go on, and whether it ends a list that came as a watch."""

    version: str
    ends_list: bool


class Passed(NamedTuple):
    """A version at which something changed that is no pod with a node."""

    version: str


Told = Upserted | Deleted | Skipped | Bookmark | Passed


class WatchReader:
    """Reads lines, and counts what they were."""

    def __init__(self, reader: PodReader) -> None:
        self._reader = reader

    def read(self, line: bytes) -> Told | None:
        """Return what a line tells; `None` for what nobody knows.

        Raises `KubernetesError` for a line that tells of an error, or is no event.
        """
        if line.startswith(_OF_A_POD):
            with suppress(UndecodableError):
                return _counted_change(self._reader.read_event(line))
        return self._read_in_parts(line)

    def _read_in_parts(self, line: bytes) -> Told | None:
        """Read what the line is before what it tells of: for all that is no pod as it should be."""
        try:
            event = decode_cut(_decode_event, line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            for kind, begin in zip(_CHANGES, _OF_A_POD, strict=True):
                if line.startswith(begin):
                    return _skipped(line, error, kind=kind)
            raise KubernetesError(f"the API server sent no watch event: {error}") from error
        if event.type in _CHANGES:
            return self._change(event)
        (_COUNTERS.get(event.type) or _COUNTERS[_UNKNOWN]).inc()
        match event.type:
            case "BOOKMARK":
                return _bookmark(event.object)
            case "ERROR":
                raise _error_of(event.object)
            case _:
                return None

    def _change(self, event: WatchEvent) -> Upserted | Deleted | Skipped | Passed:
        try:
            pod = self._reader.read(event.object)
        except UndecodableError as error:
            return _skipped(event.object, error, kind=event.type)
        version = _bookmark(event.object).version
        return _counted_change(PodOfEvent(event.type, pod, version))

    def item(self, raw: msgspec.Raw) -> Upserted | Skipped | None:
        """Return what a list tells of a pod, `None` where it has no node."""
        try:
            pod = self._reader.read(raw)
        except UndecodableError as error:
            return _skipped(raw, error)
        return Upserted(pod) if pod else None


def _skipped(data: bytes | msgspec.Raw, error: Exception, *, kind: str | None = None) -> Skipped:
    """Return that a pod cannot be read, counted and logged with its name."""
    if kind:
        _COUNTERS[kind].inc()
    metrics.UNDECODABLE.inc()
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


def _counted_change(event: PodOfEvent) -> Upserted | Deleted | Passed:
    _COUNTERS[event.kind].inc()
    if event.pod is None:
        return Passed(event.version)
    return Deleted(event.pod) if event.kind == "DELETED" else Upserted(event.pod)


def _bookmark(raw: msgspec.Raw) -> Bookmark:
    """Read the version alone; empty where the object has none."""
    try:
        meta = decode_cut(_decode_version, raw).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if count := _repeats.count("version"):
            _log.warning("version_skipped", error=str(error), count=count)
        return Bookmark("", ends_list=False)
    notes = meta.annotations
    return Bookmark(
        meta.resource_version, ends_list=notes is not None and notes.initial_events_end == "true"
    )


def _error_of(raw: msgspec.Raw) -> KubernetesError:
    """Make the error that an `ERROR` event tells of: the same Status as in an HTTP answer."""
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
