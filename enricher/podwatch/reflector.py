"""The pods as they change, for ever: list, watch, and begin again whatever the server does.

Four thin layers, each an asynchronous generator of steps: `_stream` is one watch request, which may
begin with all pods, `_list` and `_list_then_watch` make the pods' whole story, `_connection` ends
with a pause, `forever` is the loop. Nothing is kept here but the version reached and whether the
server lists as a watch; who was deleted between two lists is for the caller to see, who knows what
there was.
"""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Final

import msgspec

from enricher.podwatch import metrics
from enricher.podwatch.api import AnswerTooLargeError, Api, KubernetesError, SilentError
from enricher.podwatch.decode import PodReader, decode_cut
from enricher.podwatch.events import Bookmark, Passed, WatchReader, split_lines
from enricher.podwatch.objects import PodPage
from enricher.podwatch.settings import KubernetesSettings
from enricher.podwatch.watch_events import (
    INITIAL_EVENTS,
    Deleted,
    Interrupted,
    NoEndMarkError,
    Phase,
    Skipped,
    Step,
    Upserted,
    WatchLists,
)
from gpuledger.clock import Clock
from gpuledger.runtime.retry import Backoff

PODS_PATH: Final = "/api/v1/pods"
_WITH_A_NODE: Final = {"fieldSelector": "spec.nodeName!="}
_MIN_LIFE_SECONDS: Final = 1.0
_MAX_RETRY_AFTER_SECONDS: Final = 300.0
_NS: Final = 1_000_000_000
# A page of 500 usual pods is 4 MB; tenants may make pods of 1.5 MB each.
MAX_PAGE_BYTES: Final = 32 * 2**20
_SMALLER: Final = 4

_decode_page: Final = msgspec.json.Decoder(PodPage).decode


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
        self._events = WatchReader(reader)
        self._settings = settings
        self._clock = clock
        self._chance = chance
        # Not a `RetryingCaller`: a watch that ends is opened again too, and is no failure.
        self._backoff = Backoff(
            first_seconds=settings.backoff_first_seconds,
            max_seconds=settings.backoff_max_seconds,
            jitter=chance,
        )
        self._watch_lists = WatchLists(wanted=settings.watch_list == "auto")
        self._version: str | None = None
        self._watching_since_ns: int | None = None
        self._last_pause_seconds = 0.0

    @property
    def version(self) -> str | None:
        """From where the next watch goes on; `None` where only a list can tell."""
        return self._version

    async def forever(self) -> AsyncGenerator[Step]:
        """Yield the steps of one connection after the other."""
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
        """Return the pause after a connection.

        One that lived longer than the last pause has earned a fresh start, so that neither a server
        that closes at once nor one that always dies after a while is asked too often or too seldom.
        """
        if self._life_seconds() >= max(self._last_pause_seconds, _MIN_LIFE_SECONDS):
            self._backoff.reset()
            self._last_pause_seconds = 0.0
            if error is None:
                return 0.0
        asked = min((error and error.retry_after_seconds) or 0.0, _MAX_RETRY_AFTER_SECONDS)
        self._last_pause_seconds = max(self._backoff.next_seconds(), asked)
        return self._last_pause_seconds

    def _life_seconds(self) -> float:
        began = self._watching_since_ns
        return 0.0 if began is None else (self._clock.monotonic_ns() - began) / _NS

    async def _list_then_watch(self) -> AsyncGenerator[Step]:
        """Yield all pods if need be, in one request with the watch or in pages before it."""
        if self._version is None and self._watch_lists.wanted:
            try:
                async with aclosing(self._stream(lists=True)) as steps:
                    async for step in steps:
                        yield step
            except KubernetesError as error:
                if self.version is not None or not self._watch_lists.refused(error):
                    raise
            else:
                return
        for part in (self._list, self._stream) if self._version is None else (self._stream,):
            async with aclosing(part()) as steps:
                async for step in steps:
                    yield step

    async def _list(self) -> AsyncGenerator[Step]:
        """Yield every pod, page by page; all pages are of one version.

        Where a page is larger than may be held, smaller ones are asked for from there on.
        """
        metrics.RELISTS.inc()
        yield Phase.LISTING
        token: str | None = ""
        page: PodPage | None = None
        limit = self._settings.page_limit
        while token is not None:
            try:
                page = await self._page(token, limit=limit)
            except AnswerTooLargeError:
                if limit == 1:
                    raise
                limit = max(1, limit // _SMALLER)
                continue
            for raw in page.items or ():
                if step := self._events.item(raw):
                    yield step
            token = page.metadata.continue_token or None
        self._version = page.metadata.resource_version if page else None
        yield Phase.LISTED

    async def _page(self, token: str, *, limit: int) -> PodPage:
        query = {**_WITH_A_NODE, "limit": str(limit)}
        if token:
            query["continue"] = token
        seconds = self._settings.page_timeout_seconds
        async with self._api.get(
            PODS_PATH, query=query, idle_timeout_seconds=seconds, total_seconds=seconds
        ) as answer:
            body = await answer.read(max_bytes=MAX_PAGE_BYTES)
        try:
            return decode_cut(_decode_page, body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise KubernetesError(f"the API server sent no list of pods: {error}") from error

    async def _stream(self, *, lists: bool = False) -> AsyncGenerator[Step]:
        """Yield what one watch request tells, all pods first if so asked, until it is closed."""
        async with self._lines(lists=lists) as lines:
            if lists:
                async with aclosing(self._initial(lines)) as steps:
                    async for step in steps:
                        yield step
            self._watching_since_ns = self._clock.monotonic_ns()
            yield Phase.WATCHING
            try:
                async for line in lines:
                    match found := self._events.read(line):
                        case Upserted() | Deleted():
                            self._version = found.pod.resource_version or self._version
                            yield found
                        case Skipped(version=version):
                            self._version = version or self._version
                            yield found
                        case Bookmark() | Passed():
                            self._version = found.version or self._version
                        case None:
                            pass
            except SilentError:
                # No failure: a server on which no pod changes owes no line. Bookmarks are promised
                # at no interval, and one that is due before the server has heard of any change
                # since its own start is left out. The next watch, on a connection of its own, finds
                # out whether the server is there, and fails where it is not.
                return

    async def _initial(self, lines: AsyncGenerator[bytes]) -> AsyncGenerator[Step]:
        """Yield every pod; only when the server says that these were all is a version reached."""
        self._watch_lists.begin()
        metrics.RELISTS.inc()
        yield Phase.LISTING
        async for line in lines:
            match found := self._events.read(line):
                case Upserted() | Deleted() | Skipped():
                    yield found
                case Bookmark(version, ends_list=True):
                    self._watch_lists.end()
                    self._version = version
                    yield Phase.LISTED
                    return
                case Bookmark():
                    break
                case Passed() | None:
                    pass
        raise NoEndMarkError("the API server began a list as a watch and did not say where it ends")

    @asynccontextmanager
    async def _lines(self, *, lists: bool) -> AsyncIterator[AsyncGenerator[bytes]]:
        server_seconds = round(self._settings.watch_timeout_seconds * (1 + self._chance()))
        async with (
            self._api.get(
                PODS_PATH,
                query=self._watch_query(server_seconds, lists=lists),
                idle_timeout_seconds=self._settings.idle_timeout_seconds,
                total_seconds=server_seconds + self._settings.idle_timeout_seconds,
            ) as answer,
            aclosing(split_lines(answer.chunks())) as lines,
        ):
            yield lines

    def _watch_query(self, server_seconds: int, *, lists: bool) -> Mapping[str, str]:
        return {
            **_WITH_A_NODE,
            "watch": "true",
            "allowWatchBookmarks": "true",
            **(INITIAL_EVENTS if lists else {"resourceVersion": self._version or ""}),
            "timeoutSeconds": str(max(1, server_seconds)),
        }
