"""From the bytes of a watch to its lines, and from a line to a typed event.

What follows from an event is the reflector's business.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec
import structlog

from enricher.podwatch import metrics
from enricher.podwatch.api import KubernetesError
from enricher.podwatch.decode import HEAD_BYTES, PodOfEvent, PodReader, decode_cut, identity_of
from enricher.podwatch.objects import Status, VersionOnly, WatchEvent
from enricher.podwatch.watch_events import Deleted, Skipped, Upserted
from gpuledger.errors import UndecodableError
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.readiness import Check

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


# Lines out of chunks: pure apart from the waiting. Lines of several megabytes are no exception.

# etcd refuses objects above 1.5 MiB by default and nobody runs it with more than a few times that.
MAX_LINE_BYTES: Final = 32 * 2**20
# Of a longer line: what it is and whose, which stands at its begin. It is no JSON any more.


async def split_lines(
    chunks: AsyncGenerator[bytes], *, max_bytes: int = MAX_LINE_BYTES
) -> AsyncGenerator[bytes]:
    """Yield each whole line without its end, empty ones left out.

    Of a line longer than `max_bytes` its first `HEAD_BYTES` are given, and no more is held.
    Raises `KubernetesError` where the body ends within a line.
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
                if line_bytes <= max_bytes:
                    kept.append(rest)
                line_bytes += len(rest)
                if line_bytes > max_bytes:
                    kept[:] = [b"".join(kept)[:HEAD_BYTES]]
    if kept:
        raise KubernetesError(f"the connection ended within a line, after {line_bytes} bytes of it")


# The pods whose newest state cannot be read, as a check. What is known of them stays known.

MAX_NAMED: Final = 1000


class UnreadablePods:
    """Remembers each until it can be read or is gone."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._pods: dict[str, Skipped] = {}
        check.ok()

    def begin_list(self) -> None:
        """Record that all pods are told anew."""
        self._pods.clear()

    def add(self, pod: Skipped) -> None:
        """Record that a pod cannot be read."""
        if pod.is_deleted:
            self.discard(pod.uid)
        elif len(self._pods) < MAX_NAMED:
            self._pods[pod.uid] = pod
            self._check.failed(self._told)

    def discard(self, uid: str) -> None:
        """Record that a pod was read, or is gone."""
        if self._pods.pop(uid, None):
            self.tell()

    def tell(self) -> None:
        """Show how it stands: after a list, and when one is read again."""
        if not self._pods:
            self._check.ok()

    def _told(self) -> str:
        some = next(iter(self._pods.values()), None)
        if some is None:
            return "the pods are listed again"
        others = len(self._pods) - 1
        return f"pod {some.name} cannot be read, and {others} others: {some.error}"
