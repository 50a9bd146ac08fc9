"""From a line of a watch to what it tells. What to make of that is the reflector's business."""

from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec
import structlog

from enricher.podwatch import metrics
from enricher.podwatch.api import KubernetesError
from enricher.podwatch.decode import PodReader
from enricher.podwatch.objects import Status, VersionOnly, WatchEvent
from enricher.podwatch.steps import Deleted, Seen
from gpuledger.errors import UndecodableError
from gpuledger.records import PodRecord

_decode_event: Final = msgspec.json.Decoder(WatchEvent).decode
_decode_status: Final = msgspec.json.Decoder(Status).decode
_decode_version: Final = msgspec.json.Decoder(VersionOnly).decode
_UNKNOWN: Final = "unknown"
_COUNTERS: Final = {
    kind: metrics.EVENTS.labels(type=kind)
    for kind in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", _UNKNOWN)
}
_log = structlog.get_logger(__name__)


class Bookmark(NamedTuple):
    """A version from which to go on, and whether it ends a list that came as a watch."""

    version: str
    ends_list: bool


class Passed(NamedTuple):
    """A version at which something changed that is no pod with a node."""

    version: str


class EventReader:
    """Reads lines, and counts what they were."""

    def __init__(self, reader: PodReader) -> None:
        self._reader = reader

    def read(self, line: bytes) -> Seen | Deleted | Bookmark | Passed | None:
        """Give what a line tells; `None` for what nobody knows.

        Raises `KubernetesError` for a line that tells of an error, or is no event.
        """
        try:
            event = _decode_event(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise KubernetesError(f"the API server sent no watch event: {error}") from error
        (_COUNTERS.get(event.type) or _COUNTERS[_UNKNOWN]).inc()
        match event.type:
            case "ADDED" | "MODIFIED" | "DELETED":
                return self._change(event)
            case "BOOKMARK":
                return _bookmark(event.object)
            case "ERROR":
                raise _error_of(event.object)
            case _:
                return None

    def _change(self, event: WatchEvent) -> Seen | Deleted | Passed:
        pod = self.pod(event.object)
        if pod is None:
            return Passed(_bookmark(event.object).version)
        return Deleted(pod) if event.type == "DELETED" else Seen(pod)

    def pod(self, raw: msgspec.Raw) -> PodRecord | None:
        """Give the record of a pod, `None` where it has no node or cannot be read."""
        try:
            return self._reader.read(raw)
        except UndecodableError as error:
            metrics.UNDECODABLE.inc()
            _log.warning("pod_unreadable", error=str(error))
            return None


def _bookmark(raw: msgspec.Raw) -> Bookmark:
    """Read the version alone; empty where the object has none."""
    try:
        meta = _decode_version(raw).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _log.warning("version_unreadable", error=str(error))
        return Bookmark("", ends_list=False)
    notes = meta.annotations
    return Bookmark(
        meta.resource_version, ends_list=notes is not None and notes.initial_events_end == "true"
    )


def _error_of(raw: msgspec.Raw) -> KubernetesError:
    """Make the error that an `ERROR` event tells of: the same Status as in an HTTP answer."""
    try:
        status = _decode_status(raw)
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
