"""The objects of a kind as they change, for ever: list, watch, and begin again whatever happens.

Four thin layers, each an asynchronous generator of steps: `_stream` is one watch request, which may
begin with all objects, `_list` and `_list_then_watch` make their whole story, `_connection` ends
with a pause, `run` is the loop. Nothing is kept here but the version reached and whether the
server lists as a watch; who was deleted between two lists is for the caller to find, who knows what
there was.

What Kubernetes promises, and what follows from it:

* A `resourceVersion` is opaque and belongs to one server's history. The reflector keeps the newest
  that it has seen and hands it back; it never compares or counts with it.
* A watch sends what changed after its version. The server keeps changes for five minutes by
  default: an older version is refused with 410, at the start or as an `ERROR` in the middle, and
  only a new list helps. So a version is kept across watches, and dropped where it has expired.
* While nothing changes the server sends bookmarks, which keep the version young. It promises them
  at no interval.
* A page names the next one with `continue`, and all pages are of the version of the first. That
  token too expires with 410.
* A list as a watch (`sendInitialEvents`) is complete with the bookmark that is marked so, and with
  nothing else: until then none that is missing may be taken for deleted.
"""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Final, Generic

import msgspec
import structlog

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.runtime.retry import Backoff
from gpuledger_enricher.podwatch import pod_metrics
from gpuledger_enricher.podwatch.api import (
    AnswerTooLargeError,
    Api,
    KubernetesError,
    SilentError,
)
from gpuledger_enricher.podwatch.decode import ObjectReader, decode_cut
from gpuledger_enricher.podwatch.events import (
    Bookmark,
    Deleted,
    Interrupted,
    Passed,
    Phase,
    Skipped,
    Step,
    Upserted,
    WatchReader,
    split_lines,
)
from gpuledger_enricher.podwatch.kinds import ObjectKind
from gpuledger_enricher.podwatch.objects import ObjectPage
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from gpuledger_enricher.watched_records import RecordT

_INITIAL_EVENTS: Final = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
_MAX_UNENDED: Final = 2
# How servers and proxies refuse a parameter that they do not know.
_UNSUPPORTED: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.NOT_ACCEPTABLE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.NOT_IMPLEMENTED,
    }
)
_MIN_LIFE_SECONDS: Final = 1.0
_MAX_RETRY_AFTER_SECONDS: Final = 300.0
# A page of 500 usual pods is 4 MB; tenants may make pods of 1.5 MB each.
MAX_PAGE_BYTES: Final = 32 * 2**20
_PAGE_SHRINK_FACTOR: Final = 4
_decode_page: Final = msgspec.json.Decoder(ObjectPage).decode
_log = structlog.get_logger(__name__)


class NoEndMarkError(KubernetesError):
    """A list as a watch went on, or ended, without the bookmark that ends it."""


class WatchLists:
    """Whether objects are listed as a watch, by what the server did with that until now. Pure.

    A list as a watch costs the server less and comes one object at a time. Servers before
    Kubernetes 1.34 refuse it unless configured otherwise, and a proxy in between may not bear it.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._unended = 0

    @property
    def wanted(self) -> bool:
        """Whether to query the next list as a watch: not after two in a row broke off."""
        return self._wanted and self._unended < _MAX_UNENDED

    def begin(self) -> None:
        """Record that the server has agreed to one."""
        self._unended += 1

    def end(self) -> None:
        """Record that every object came."""
        self._unended = 0

    def refused(self, error: KubernetesError) -> bool:
        """Return whether the server will not do this, so that pages are to be read at once.

        For ever, but where a permission is missing, which may be granted.
        """
        if isinstance(error, NoEndMarkError) or error.status in _UNSUPPORTED:
            self._wanted = False
            _log.info("watch_list_refused", error=str(error))
            return True
        return error.status == HTTPStatus.FORBIDDEN


class Reflector(Generic[RecordT]):
    """Follows the objects of one kind of one API server."""

    def __init__(
        self,
        *,
        api: Api,
        reader: ObjectReader[RecordT],
        settings: KubernetesSettings,
        clock: Clock,
        kind: ObjectKind[RecordT],
        chance: Callable[[], float] = random.random,
        version: str | None = None,
    ) -> None:
        """Take the parts; with a `version` it goes on with what came after that, without a list."""
        self._api = api
        self._kind = kind
        self._events = WatchReader(reader, kind=kind.name)
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
        self._version = version
        self._watching_since_ns: int | None = None
        self._last_pause_seconds = 0.0

    @property
    def version(self) -> str | None:
        """From where the next watch goes on; `None` where a list is needed first."""
        return self._version

    async def run(self) -> AsyncGenerator[Step[RecordT]]:
        """Yield the steps of one connection after the other."""
        while True:
            async with aclosing(self._connection()) as steps:
                async for step in steps:
                    yield step

    async def _connection(self) -> AsyncGenerator[Step[RecordT]]:
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
            if error.expired:
                self._version = None
            status = str(error.status or "none")
            pod_metrics.INTERRUPTIONS.labels(kind=self._kind.name, status=status).inc()
            yield Interrupted(error)
        await self._clock.sleep(self._pause_seconds(error))

    def _pause_seconds(self, error: KubernetesError | None) -> float:
        """Return the pause after a connection.

        After one that lasted longer than the last pause the backoff begins anew: a server that
        closes at once does not get requests too often, nor one that ends after a while too seldom.
        """
        began_ns = self._watching_since_ns
        life_ns = 0 if began_ns is None else self._clock.monotonic_ns() - began_ns
        if life_ns / NS_PER_SECOND >= max(self._last_pause_seconds, _MIN_LIFE_SECONDS):
            self._backoff.reset()
            self._last_pause_seconds = 0.0
            if error is None:
                # The usual end: the server closes a watch when the time that it was given is over.
                return 0.0
        # Bounded: a server that sends 86400 would be without podwatch for a day.
        requested = min((error and error.retry_after_seconds) or 0.0, _MAX_RETRY_AFTER_SECONDS)
        self._last_pause_seconds = max(self._backoff.next_seconds(), requested)
        return self._last_pause_seconds

    async def _list_then_watch(self) -> AsyncGenerator[Step[RecordT]]:
        """Yield all objects if need be, in one request with the watch or in pages before it."""
        if self._version is None and self._watch_lists.wanted:
            try:
                async with aclosing(self._stream(lists=True)) as steps:
                    async for step in steps:
                        yield step
            except KubernetesError as error:
                # With a version the list was complete: it is the watch behind it that failed.
                if self.version is not None or not self._watch_lists.refused(error):
                    raise
            else:
                return
        for part in (self._list, self._stream) if self._version is None else (self._stream,):
            async with aclosing(part()) as steps:
                async for step in steps:
                    yield step

    async def _list(self) -> AsyncGenerator[Step[RecordT]]:
        """Yield every object, page by page; all pages are of one version.

        Where a page is larger than may be held, smaller ones are read from there on.
        """
        pod_metrics.RELISTS.labels(kind=self._kind.name).inc()
        yield Phase.LISTING
        token: str | None = ""
        page: ObjectPage | None = None
        limit = self._settings.page_limit
        while token is not None:
            try:
                page = await self._page(token, limit=limit)
            except AnswerTooLargeError:
                if limit == 1:
                    raise
                # The token names the next object and no size, so it is good for a smaller page.
                limit = max(1, limit // _PAGE_SHRINK_FACTOR)
                continue
            for raw in page.items or ():
                if step := self._events.item(raw):
                    yield step
            token = page.metadata.continue_token or None
        # Only now: a watch from a list that broke off would miss the objects of the pages not read.
        self._version = page.metadata.resource_version if page else None
        yield Phase.LISTED

    async def _page(self, token: str, *, limit: int) -> ObjectPage:
        # Without `resourceVersion` the list is as new as etcd. From the cache of a server that is
        # behind, objects that are gone would be published anew.
        query = {**self._kind.selector, "limit": str(limit)}
        if token:
            query["continue"] = token
        seconds = self._settings.page_timeout_seconds
        async with self._api.get(
            self._kind.path,
            query=query,
            idle_timeout_seconds=seconds,
            total_seconds=seconds,
            accept=self._kind.accept(as_list=True),
        ) as answer:
            body = await answer.read(max_bytes=MAX_PAGE_BYTES)
        try:
            return decode_cut(_decode_page, body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise KubernetesError(
                f"the API server sent no list of {self._kind.plural}: {error}"
            ) from error

    async def _stream(self, *, lists: bool = False) -> AsyncGenerator[Step[RecordT]]:
        """Yield the steps of one watch request, with `lists` all objects first, until its end."""
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
                        # The version is taken before the step is yielded, so that the caller reads
                        # at `version` how far it is with this step.
                        case Upserted() | Deleted():
                            self._version = found.record.resource_version or self._version
                            yield found
                        case Skipped(version=version):
                            # Its version too: the next watch would otherwise begin before it.
                            self._version = version or self._version
                            yield found
                        case Bookmark() | Passed():
                            self._version = found.version or self._version
                        case None:
                            pass
            except SilentError:
                # No failure: a server on which nothing changes owes no line. Bookmarks are promised
                # at no interval, and one that is due before the server has heard of any change
                # since its own start is left out. The next watch, on a connection of its own, finds
                # out whether the server is there, and fails where it is not.
                return

    async def _initial(self, lines: AsyncGenerator[bytes]) -> AsyncGenerator[Step[RecordT]]:
        """Yield every object; only the bookmark that ends the list is a version reached."""
        self._watch_lists.begin()
        pod_metrics.RELISTS.labels(kind=self._kind.name).inc()
        yield Phase.LISTING
        async for line in lines:
            match found := self._events.read(line):
                case Upserted() | Deleted() | Skipped():
                    # Without its version: these come in no order of versions.
                    yield found
                case Bookmark(version, ends_list=True):
                    self._watch_lists.end()
                    self._version = version
                    yield Phase.LISTED
                    return
                case Bookmark():
                    # A server that knows bookmarks and not `sendInitialEvents` ignores the latter,
                    # and goes on for ever without an end mark.
                    break
                case Passed() | None:
                    pass
        raise NoEndMarkError("the API server began a list as a watch and did not say where it ends")

    @asynccontextmanager
    async def _lines(self, *, lists: bool) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Open a watch, and yield its lines."""
        # By chance up to twice as long, as for other clients: those that began together after a
        # restart of the server do not all come back together.
        server_seconds = round(self._settings.watch_timeout_seconds * (1 + self._chance()))
        query = {
            **self._kind.selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            **(_INITIAL_EVENTS if lists else {"resourceVersion": self._version or ""}),
            # 0 would be no limit, that is the server's own.
            "timeoutSeconds": str(max(1, server_seconds)),
        }
        async with (
            self._api.get(
                self._kind.path,
                query=query,
                accept=self._kind.accept(as_list=False),
                idle_timeout_seconds=self._settings.idle_timeout_seconds,
                # The server ends it; this is for one that does not.
                total_seconds=server_seconds + self._settings.idle_timeout_seconds,
            ) as answer,
            aclosing(split_lines(answer.chunks())) as lines,
        ):
            yield lines
