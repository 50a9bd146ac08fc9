"""The pods as they change, for ever: list, watch, and begin again whatever the server does.

Four thin layers, each an asynchronous generator of steps: `_stream` is one watch request, `_list`
and `_list_then_watch` make the pods' whole story, `_connection` ends with a pause, `forever` is
the loop. Nothing is kept here but the version reached; who was deleted between two lists is for
the caller to see, who knows what there was.
"""

import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Final

import msgspec
import structlog

from enricher.podwatch import metrics
from enricher.podwatch.api import Api, KubernetesError
from enricher.podwatch.decode import PodReader
from enricher.podwatch.lines import split_lines
from enricher.podwatch.objects import PodPage, Status, VersionOnly, WatchEvent
from enricher.podwatch.settings import KubernetesSettings
from enricher.podwatch.steps import Deleted, Interrupted, Mark, Seen, Step
from gpuledger.clock import Clock
from gpuledger.errors import UndecodableError
from gpuledger.records import PodRecord
from gpuledger.service.backoff import Backoff

PODS_PATH: Final = "/api/v1/pods"
_WITH_A_NODE: Final = {"fieldSelector": "spec.nodeName!="}
_LEAST_LIFE_SECONDS: Final = 1.0
_MOST_RETRY_AFTER_SECONDS: Final = 300.0
_NS: Final = 1_000_000_000

_decode_event: Final = msgspec.json.Decoder(WatchEvent).decode
_decode_page: Final = msgspec.json.Decoder(PodPage).decode
_decode_status: Final = msgspec.json.Decoder(Status).decode
_decode_version: Final = msgspec.json.Decoder(VersionOnly).decode
_log = structlog.get_logger(__name__)


class Reflector:
    """Follows the pods of one API server."""

    def __init__(
        self,
        *,
        api: Api,
        reader: PodReader,
        settings: KubernetesSettings,
        clock: Clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._api = api
        self._reader = reader
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._backoff = Backoff(
            first_seconds=settings.backoff_first_seconds,
            most_seconds=settings.backoff_most_seconds,
            jitter=chance,
        )
        self._version: str | None = None
        self._watching_since_ns: int | None = None
        self._last_pause_seconds = 0.0

    @property
    def version(self) -> str | None:
        """From where the next watch goes on; `None` where only a list can tell."""
        return self._version

    async def forever(self) -> AsyncGenerator[Step]:
        """Give the steps of one connection after the other."""
        while True:
            async with aclosing(self._connection()) as steps:
                async for step in steps:
                    yield step

    async def _connection(self) -> AsyncGenerator[Step]:
        """List if need be, watch until that ends, pause as it deserves."""
        self._watching_since_ns = None
        error: KubernetesError | None = None
        try:
            async with aclosing(self._list_then_watch()) as steps:
                async for step in steps:
                    yield step
        except KubernetesError as caught:
            error = caught
        if error is not None:
            yield self._interrupted(error)
        await self._clock.sleep(self._pause_seconds(error))

    def _interrupted(self, error: KubernetesError) -> Interrupted:
        if error.expired:
            self._version = None
        metrics.INTERRUPTIONS.labels(status=str(error.status or "none")).inc()
        return Interrupted(error)

    def _pause_seconds(self, error: KubernetesError | None) -> float:
        """Give the pause after a connection.

        One that lived longer than the last pause has earned a fresh start, so that neither a server
        that closes at once nor one that always dies after a while is asked too often or too seldom.
        """
        if self._life_seconds() >= max(self._last_pause_seconds, _LEAST_LIFE_SECONDS):
            self._backoff.reset()
            self._last_pause_seconds = 0.0
            if error is None:
                return 0.0
        asked = min((error and error.retry_after_seconds) or 0.0, _MOST_RETRY_AFTER_SECONDS)
        self._last_pause_seconds = max(self._backoff.next_seconds(), asked)
        return self._last_pause_seconds

    def _life_seconds(self) -> float:
        began = self._watching_since_ns
        return 0.0 if began is None else (self._clock.monotonic_ns() - began) / _NS

    async def _list_then_watch(self) -> AsyncGenerator[Step]:
        if self._version is None:
            async with aclosing(self._list()) as steps:
                async for step in steps:
                    yield step
        async with aclosing(self._stream()) as steps:
            async for step in steps:
                yield step

    async def _list(self) -> AsyncGenerator[Step]:
        """Give every pod, page by page; all pages are of one version."""
        metrics.RELISTS.inc()
        yield Mark.LISTING
        token: str | None = ""
        page: PodPage | None = None
        while token is not None:
            page = await self._page(token)
            for raw in page.items or ():
                if pod := self._read(raw):
                    yield Seen(pod)
            token = page.metadata.continue_token or None
        self._version = page.metadata.resource_version if page else None
        yield Mark.LISTED

    async def _page(self, token: str) -> PodPage:
        query = {**_WITH_A_NODE, "limit": str(self._settings.page_limit)}
        if token:
            query["continue"] = token
        seconds = self._settings.page_timeout_seconds
        async with self._api.get(
            PODS_PATH, query=query, silence_seconds=seconds, total_seconds=seconds
        ) as answer:
            body = await answer.read()
        try:
            return _decode_page(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise KubernetesError(f"the API server sent no list of pods: {error}") from error

    async def _stream(self) -> AsyncGenerator[Step]:
        """Give what one watch request tells, until the server closes it."""
        server_seconds = round(self._settings.watch_timeout_seconds * (1 + self._chance()))
        async with self._api.get(
            PODS_PATH,
            query=self._watch_query(server_seconds),
            silence_seconds=self._settings.silence_seconds,
            total_seconds=server_seconds + self._settings.silence_seconds,
        ) as answer:
            self._watching_since_ns = self._clock.monotonic_ns()
            yield Mark.WATCHING
            async with aclosing(split_lines(answer.chunks())) as lines:
                async for line in lines:
                    if step := self._step(line):
                        yield step

    def _watch_query(self, server_seconds: int) -> Mapping[str, str]:
        return {
            **_WITH_A_NODE,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(max(1, server_seconds)),
        }

    def _step(self, line: bytes) -> Step | None:
        """Read one line of a watch; `None` for what says nothing of a pod with a node."""
        try:
            event = _decode_event(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise KubernetesError(f"the API server sent no watch event: {error}") from error
        match event.type:
            case "ADDED" | "MODIFIED" | "DELETED":
                metrics.EVENTS.labels(type=event.type).inc()
                return self._pod_step(event)
            case "BOOKMARK":
                metrics.EVENTS.labels(type=event.type).inc()
                self._advance(event.object)
            case "ERROR":
                metrics.EVENTS.labels(type=event.type).inc()
                raise _error_of(event.object)
            case _:
                metrics.EVENTS.labels(type="unknown").inc()
        return None

    def _pod_step(self, event: WatchEvent) -> Step | None:
        pod = self._read(event.object)
        if pod is None:
            self._advance(event.object)
            return None
        self._version = pod.resource_version or self._version
        return Deleted(pod) if event.type == "DELETED" else Seen(pod)

    def _advance(self, raw: msgspec.Raw) -> None:
        """Go on from this object's version next time; where it has none, the one before will do."""
        try:
            self._version = _decode_version(raw).metadata.resource_version or self._version
        except msgspec.MsgspecError as error:
            _log.warning("version_unreadable", error=str(error))

    def _read(self, raw: msgspec.Raw) -> PodRecord | None:
        try:
            return self._reader.read(raw)
        except UndecodableError as error:
            metrics.UNDECODABLE.inc()
            _log.warning("pod_unreadable", error=str(error))
            return None


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
