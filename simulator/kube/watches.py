"""Answers a watch: the events after a version, bookmarks between them, an ERROR when it is too old.

Here live the lines of a watch as a generator. The socket is `server`'s business.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final

import orjson

from simulator.kube import failures
from simulator.kube.failures import ApiError
from simulator.kube.requests import Selector
from simulator.kube.store import Collection, Json, StoredChange

DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
_INITIAL_END: Final = {"k8s.io/initial-events-end": "true"}


class ApiWatch:
    """One watcher's place in a collection's changes."""

    def __init__(
        self,
        collection: Collection,
        selector: Selector,
        query: Mapping[str, str],
        *,
        bookmark_seconds: float,
    ) -> None:
        self._collection = collection
        self._selector = selector
        self._bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
        self._bookmark_seconds = bookmark_seconds
        self._timeout_seconds = float(query.get("timeoutSeconds") or DEFAULT_TIMEOUT_SECONDS)
        self._wants_initial = query.get("sendInitialEvents") == "true"
        if self._wants_initial and query.get("resourceVersionMatch") != "NotOlderThan":
            raise failures.invalid(
                "resourceVersionMatch: Forbidden: sendInitialEvents requires setting "
                "resourceVersionMatch to NotOlderThan"
            )
        asked = query.get("resourceVersion") or "0"
        if not asked.isdigit():
            raise failures.unworded(f'parsing resource version "{asked}": invalid syntax')
        self._version = int(asked)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the answer until its time is over or its version is forgotten."""
        try:
            for line in self._initial():
                yield line
            async for line in self._following():
                yield line
        except ApiError as error:
            yield _line("ERROR", error.status)

    def _initial(self) -> Iterator[bytes]:
        """Without a version, or when asked to, begin with every object as ADDED."""
        if self._version and not self._wants_initial:
            return
        current = self._collection.versions.current
        if self._version > current:
            raise failures.too_new(self._version, current)
        for item in self._collection.items():
            if self._selector(item):
                yield _line("ADDED", item)
        self._version = current
        if self._wants_initial and self._bookmarks:
            yield self._bookmark(annotations=_INITIAL_END)

    async def _following(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout_seconds
        bookmark_at = loop.time() + self._bookmark_seconds
        while loop.time() < end:
            ticket = self._collection.versions.ticket()
            for change in self._collection.changes_after(self._version):
                self._version = change.version
                if line := self._event(change):
                    yield line
            if self._bookmarks and loop.time() >= bookmark_at:
                self._version = max(self._version, self._collection.versions.current)
                yield self._bookmark()
                bookmark_at = loop.time() + self._bookmark_seconds
            await self._collection.versions.wait(ticket, min(end, bookmark_at) - loop.time())

    def _event(self, change: StoredChange) -> bytes | None:
        """Word a change as this watcher sees it: by what its selector makes of before and after."""
        before = change.before is not None and self._selector(change.before)
        after = change.after is not None and self._selector(change.after)
        if change.after is not None and after:
            return _line("MODIFIED" if before else "ADDED", change.after)
        if change.before is not None and before:
            metadata = {**change.before["metadata"], "resourceVersion": str(change.version)}
            return _line("DELETED", {**change.before, "metadata": metadata})
        return None

    def _bookmark(self, annotations: dict[str, str] | None = None) -> bytes:
        metadata: Json = {"resourceVersion": str(self._version), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        return _line(
            "BOOKMARK",
            {
                "kind": self._collection.kind,
                "apiVersion": self._collection.api_version,
                "metadata": metadata,
                "spec": {"containers": None},
                "status": {},
            },
        )


def _line(kind: str, item: Json) -> bytes:
    return orjson.dumps({"type": kind, "object": item}) + b"\n"
