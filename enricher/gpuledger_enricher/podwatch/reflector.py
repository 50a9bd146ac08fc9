"""Follows the objects of a kind: lists, watches, and starts again after every failure.

Objects can be listed in pages, or as a watch: one watch request that first returns all objects, and
then the changes. The code has four thin layers, each an asynchronous generator of steps:

- `_list` is one list in pages; `_stream` is one watch request, which may begin with a list.
- `_list_then_watch` lists if necessary, and then watches.
- `_connection` calls `_list_then_watch` once, and then pauses.
- `run` repeats `_connection` forever.

The only state is the version reached and whether the server can list as a watch. The caller finds
the objects that were deleted between two lists, because the caller has the previous objects.

Guarantees of Kubernetes, and their consequences:

* A `resourceVersion` is opaque and belongs to one server's history. The reflector keeps the newest
  version that it has seen and sends it back, without comparisons or calculations.
* A watch sends the changes after its version. The server keeps changes for five minutes by default.
  An older version is rejected with 410, at the start or as an `ERROR` in the middle, and then only
  a new list helps. So a version is kept across watches, and dropped when it has expired.
* While nothing changes, the server sends bookmarks, which keep the version recent. Their interval
  is not guaranteed.
* A page refers to the next page with `continue`, and all pages have the version of the first one.
  The `continue` token expires with 410, too.
* A list as a watch (`sendInitialEvents`) is complete only with the bookmark that is marked as its
  end. Before this bookmark, a missing object must not count as deleted.
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
# Statuses with which servers and proxies reject a parameter that they do not support.
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
# A page of 500 typical pods is 4 MB; tenants may create pods of 1.5 MB each.
MAX_PAGE_BYTES: Final = 32 * 2**20
_PAGE_SHRINK_FACTOR: Final = 4
_decode_page: Final = msgspec.json.Decoder(ObjectPage).decode
_log = structlog.get_logger(__name__)


class NoEndMarkError(KubernetesError):
    """A list as a watch ended without a bookmark that marks its end."""


class WatchLists:
    """Decides whether to list objects as a watch, by the server's responses so far. Pure.

    Such a list is a watch request that first returns all objects. It costs the server less, and its
    objects come one at a time. Servers before Kubernetes 1.34 reject it unless configured
    otherwise, and proxies may interrupt it.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._unended = 0

    @property
    def wanted(self) -> bool:
        """Whether to request the next list as a watch; false after two incomplete ones in a row."""
        return self._wanted and self._unended < _MAX_UNENDED

    def begin(self) -> None:
        """Record that the server has accepted a list as a watch."""
        self._unended += 1

    def end(self) -> None:
        """Record that the list is complete."""
        self._unended = 0

    def refused(self, error: KubernetesError) -> bool:
        """Return whether the server cannot list as a watch, so that the list must be read in pages.

        The answer applies to all later lists, except after 403: the permission may be granted
        later.
        """
        if isinstance(error, NoEndMarkError) or error.status in _UNSUPPORTED:
            self._wanted = False
            _log.info("watch_list_refused", error=str(error))
            return True
        return error.status == HTTPStatus.FORBIDDEN


class Reflector(Generic[RecordT]):
    """Follows the objects of one kind in one API server."""

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
        """Create a reflector; with a `version`, it continues after this version without a list."""
        self._api = api
        self._kind = kind
        self._events = WatchReader(reader, kind=kind.name)
        self._settings = settings
        self._clock = clock
        self._chance = chance
        # Not a `RetryingCaller`: a watch that ends without a failure is reopened as well.
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
        """Version after which the next watch continues; `None` if a list is needed first."""
        return self._version

    async def run(self) -> AsyncGenerator[Step[RecordT]]:
        """Yield the steps of one connection after another."""
        while True:
            async with aclosing(self._connection()) as steps:
                async for step in steps:
                    yield step

    async def _connection(self) -> AsyncGenerator[Step[RecordT]]:
        """List if necessary, watch until the watch ends, then pause."""
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
        """Return the pause after a connection, in seconds.

        The backoff starts again after a connection that lasted longer than the last pause. So a
        server that closes connections at once does not get too many requests, and a server that
        closes them after a while does not get too few.
        """
        began_ns = self._watching_since_ns
        life_ns = 0 if began_ns is None else self._clock.monotonic_ns() - began_ns
        if life_ns / NS_PER_SECOND >= max(self._last_pause_seconds, _MIN_LIFE_SECONDS):
            self._backoff.reset()
            self._last_pause_seconds = 0.0
            if error is None:
                # The usual end: the server closes a watch after the requested time.
                return 0.0
        # Limited, because a server that requests 86400 s would stop podwatch for a day.
        requested = min((error and error.retry_after_seconds) or 0.0, _MAX_RETRY_AFTER_SECONDS)
        self._last_pause_seconds = max(self._backoff.next_seconds(), requested)
        return self._last_pause_seconds

    async def _list_then_watch(self) -> AsyncGenerator[Step[RecordT]]:
        """List if necessary, then watch: in a single request, or first a list in pages."""
        if self._version is None and self._watch_lists.wanted:
            try:
                async with aclosing(self._stream(lists=True)) as steps:
                    async for step in steps:
                        yield step
            except KubernetesError as error:
                # If there is a version, the list was complete, and only the watch after it failed.
                if self.version is not None or not self._watch_lists.refused(error):
                    raise
            else:
                return
        for part in (self._list, self._stream) if self._version is None else (self._stream,):
            async with aclosing(part()) as steps:
                async for step in steps:
                    yield step

    async def _list(self) -> AsyncGenerator[Step[RecordT]]:
        """Yield every object, page by page; all pages have the same version.

        If a page is larger than the limit, this page and the following ones are requested with
        fewer objects. Raise `AnswerTooLargeError` if a page with one object is larger.
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
                # The token refers to the next object, not to a page size, so smaller pages can use
                # it.
                limit = max(1, limit // _PAGE_SHRINK_FACTOR)
                continue
            for raw in page.items or ():
                if step := self._events.item(raw):
                    yield step
            token = page.metadata.continue_token or None
        # Not earlier: a watch after an interrupted list would miss the objects of unread pages.
        self._version = page.metadata.resource_version if page else None
        yield Phase.LISTED

    async def _page(self, token: str, *, limit: int) -> ObjectPage:
        # Without `resourceVersion`, the list is as new as etcd. A list from the cache of a server
        # that is behind would publish deleted objects again.
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
                f"the API server's response is not a list of {self._kind.plural}: {error}"
            ) from error

    async def _stream(self, *, lists: bool = False) -> AsyncGenerator[Step[RecordT]]:
        """Yield the steps of one watch request until it ends; with `lists`, all objects first."""
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
                        # The version is set before the step is yielded, so `version` has the
                        # version of this step when the caller gets it.
                        case Upserted() | Deleted():
                            self._version = found.record.resource_version or self._version
                            yield found
                        case Skipped(version=version):
                            # The version of a skipped object counts, too; otherwise the next watch
                            # would return the object again.
                            self._version = version or self._version
                            yield found
                        case Bookmark() | Passed():
                            self._version = found.version or self._version
                        case None:
                            pass
            except SilentError:
                # Not a failure: if nothing changes, the server may send nothing. Bookmarks have no
                # guaranteed interval, and a server omits them until it has seen its first change
                # after its start. If the server is unavailable, the next watch fails, because it
                # uses a new connection.
                return

    async def _initial(self, lines: AsyncGenerator[bytes]) -> AsyncGenerator[Step[RecordT]]:
        """Yield every object; set the version at the bookmark that ends the list.

        Raise `NoEndMarkError` if there is no such bookmark.
        """
        self._watch_lists.begin()
        pod_metrics.RELISTS.labels(kind=self._kind.name).inc()
        yield Phase.LISTING
        async for line in lines:
            match found := self._events.read(line):
                case Upserted() | Deleted() | Skipped():
                    # The version is ignored, because these objects are not ordered by version.
                    yield found
                case Bookmark(version, ends_list=True):
                    self._watch_lists.end()
                    self._version = version
                    yield Phase.LISTED
                    return
                case Bookmark():
                    # A server that supports bookmarks but not `sendInitialEvents` ignores
                    # `sendInitialEvents` and never marks the end of a list.
                    break
                case Passed() | None:
                    pass
        raise NoEndMarkError("the API server did not mark the end of a list as a watch")

    @asynccontextmanager
    async def _lines(self, *, lists: bool) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Open a watch and yield an iterator over its lines."""
        # Randomly up to twice as long, as in other clients, so that watches that began together
        # after a restart of the server do not end together.
        server_seconds = round(self._settings.watch_timeout_seconds * (1 + self._chance()))
        query = {
            **self._kind.selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            **(_INITIAL_EVENTS if lists else {"resourceVersion": self._version or ""}),
            # 0 would mean the server's own limit.
            "timeoutSeconds": str(max(1, server_seconds)),
        }
        async with (
            self._api.get(
                self._kind.path,
                query=query,
                accept=self._kind.accept(as_list=False),
                idle_timeout_seconds=self._settings.idle_timeout_seconds,
                # The server ends the watch; this limit applies if it does not.
                total_seconds=server_seconds + self._settings.idle_timeout_seconds,
            ) as answer,
            aclosing(split_lines(answer.chunks())) as lines,
        ):
            yield lines
