"""Handles the requests for one kind of object, between HTTP and the store.

This module reads parameters and bodies, and returns objects, lists (with selectors, `limit`,
`continue` and `resourceVersion`) and the lines of a watch. `server` handles routes and sockets.
"""

import asyncio
import base64
import binascii
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from gpuledger_simulator.kube.store import (
    ApiError,
    Collection,
    Key,
    StoredChange,
    bad_request,
    bind_pod,
    create_object,
    delete_object,
    expired,
    invalid,
    patch_object,
    patch_status,
    too_new,
    unworded,
)
from gpuledger_simulator.kube_objects import Json

Selector = Callable[[Json], bool]

_TERM: Final = re.compile(r"^\s*([^=!\s]+)\s*(==|!=|=)\s*([^=!]*?)\s*$")
_FIELDS: Final[dict[str, Callable[[Json], str]]] = {
    "metadata.name": lambda item: str(item["metadata"]["name"]),
    "metadata.namespace": lambda item: str(item["metadata"].get("namespace", "")),
    "spec.nodeName": lambda item: str(item.get("spec", {}).get("nodeName", "")),
    "status.phase": lambda item: str(item.get("status", {}).get("phase", "")),
}


def parse_selectors(*, fields: str, labels: str, namespace: str = "") -> Selector:
    """Return one predicate for both selectors and the namespace.

    A `fieldSelector` supports equality, a `labelSelector` equality and presence. Raise `ApiError`
    400 if a selector is invalid.
    """
    tests = [_field_test(term) for term in fields.split(",") if term]
    tests += [_label_test(term) for term in labels.split(",") if term]
    if namespace:
        tests.append(lambda item: item["metadata"].get("namespace") == namespace)
    return lambda item: all(test(item) for test in tests)


def _field_test(term: str) -> Selector:
    match = _TERM.match(term)
    if not match:
        raise bad_request(f"invalid selector: '{term}'; can't understand '{term}'")
    name, operator, wanted = match.groups()
    if name not in _FIELDS:
        raise bad_request(f"field label not supported: {name}")
    read = _FIELDS[name]
    return lambda item: (read(item) == wanted) is (operator != "!=")


def _label_test(term: str) -> Selector:
    match = _TERM.match(term)
    if not match:
        # A term without an operator tests for presence (`name`) or absence (`!name`).
        name = term.strip()
        absent = name.startswith("!")
        name = name.removeprefix("!")
        return lambda item: (name in (item["metadata"].get("labels") or {})) is not absent
    name, operator, wanted = match.groups()
    return lambda item: (
        # As on a real server, `!=` also matches an object without the label.
        ((item["metadata"].get("labels") or {}).get(name) == wanted) is (operator != "!=")
    )


Stream = Callable[[web.Request, Collection, Selector], Awaitable[web.StreamResponse]]


class KubeRequests:
    """The requests for one kind of object."""

    def __init__(
        self,
        collection: Collection,
        stream: Stream,
    ) -> None:
        self._collection = collection
        self._stream = stream

    async def read_many(self, request: web.Request) -> web.StreamResponse:
        """List or watch objects."""
        select = parse_selectors(
            fields=request.query.get("fieldSelector", ""),
            labels=request.query.get("labelSelector", ""),
            namespace=request.match_info.get("namespace", ""),
        )
        if request.query.get("watch") in ("true", "1"):
            return await self._stream(request, self._collection, select)
        return answer(list_objects(self._collection, select, request.query))

    async def read(self, request: web.Request) -> web.Response:
        """Return one object."""
        return answer(self._collection.get(_key(request)))

    async def create(self, request: web.Request) -> web.Response:
        """Create an object."""
        namespace = request.match_info.get("namespace", "")
        return answer(
            create_object(self._collection, await _body(request), namespace=namespace), 201
        )

    async def patch(self, request: web.Request) -> web.Response:
        """Merge the patch in the body into metadata and spec."""
        return answer(patch_object(self._collection, _key(request), await _body(request)))

    async def patch_status(self, request: web.Request) -> web.Response:
        """Merge the patch in the body into the status."""
        return answer(patch_status(self._collection, _key(request), await _body(request)))

    async def bind(self, request: web.Request) -> web.Response:
        """Assign a pod to the node that the binding in the body names."""
        target = (await _body(request)).get("target") or {}
        if not target.get("name"):
            raise invalid("target.name: Required value")
        bind_pod(self._collection, _key(request), target["name"], time_ns=time.time_ns())
        return answer({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}, 201)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete an object; the grace period is in the query or in the body."""
        options = await _body(request) if request.can_read_body else {}
        text = request.query.get("gracePeriodSeconds", options.get("gracePeriodSeconds"))
        grace_seconds = None if text is None else int(text)
        return answer(delete_object(self._collection, _key(request), grace_seconds=grace_seconds))


def _key(request: web.Request) -> Key:
    return request.match_info.get("namespace", ""), request.match_info["name"]


async def _body(request: web.Request) -> Json:
    try:
        body = orjson.loads(await request.read())
    except ValueError as error:
        raise bad_request(f"invalid JSON in the body: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object")
    return body


def answer(item: Json, code: int = 200) -> web.Response:
    """Return an HTTP response with an object as JSON."""
    return web.Response(body=orjson.dumps(item), status=code, content_type="application/json")


def list_objects(collection: Collection, selector: Selector, query: Mapping[str, str]) -> Json:
    """Return a page of a list in the API server's format.

    Raise `ApiError` 400 if a parameter is invalid, 410 if the version has expired, and 504 if the
    version does not exist yet.
    """
    token = query.get("continue", "")
    if token:
        # All pages have the version of the first page, and its snapshot was kept for them.
        version, start = _parse_token(token)
        items = collection.snapshot_at(version)
    else:
        wanted = _number(query, "resourceVersion")
        current = collection.versions.current
        if wanted > current:
            raise too_new(wanted, current)
        if query.get("resourceVersionMatch") == "Exact" and wanted != current:
            if not collection.is_kept(wanted):
                raise expired("The resourceVersion for the provided list is too old.")
            raise bad_request("this server supports an exact match only for its newest version")
        start = 0
        version, items = collection.snapshot()
    limit = _number(query, "limit")
    chosen = [item for item in items if selector(item)]
    # A list at version 0 comes from the server's watch cache, which does not paginate.
    unpaged = not limit or (not token and query.get("resourceVersion") == "0")
    end = len(chosen) if unpaged else min(start + limit, len(chosen))
    metadata: Json = {"resourceVersion": str(version)}
    if end < len(chosen):
        following = {"v": "meta.k8s.io/v1", "rv": version, "start": end}
        metadata["continue"] = base64.urlsafe_b64encode(orjson.dumps(following)).decode()
        metadata["remainingItemCount"] = len(chosen) - end
    return {
        "kind": f"{collection.kind}List",
        "apiVersion": collection.api_version,
        "metadata": metadata,
        # Items of a typed list contain neither kind nor apiVersion.
        "items": [
            {name: value for name, value in item.items() if name not in ("kind", "apiVersion")}
            for item in chosen[start:end]
        ],
    }


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name) or "0"
    if not text.isdigit():
        raise bad_request(f'invalid {name}: "{text}"')
    return int(text)


def _parse_token(token: str) -> tuple[int, int]:
    try:
        parsed: Any = orjson.loads(base64.urlsafe_b64decode(token))
        return int(parsed["rv"]), int(parsed["start"])
    except (binascii.Error, ValueError, KeyError, TypeError) as error:
        raise bad_request("continue key is not valid") from error


DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
_INITIAL_END: Final = {"k8s.io/initial-events-end": "true"}


class ApiWatch:
    """A watch of a collection, with the last version that it has sent."""

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
        self._sends_initial = query.get("sendInitialEvents") == "true"
        if self._sends_initial and query.get("resourceVersionMatch") != "NotOlderThan":
            raise invalid(
                "resourceVersionMatch: Forbidden: sendInitialEvents requires setting "
                "resourceVersionMatch to NotOlderThan"
            )
        wanted = query.get("resourceVersion") or "0"
        if not wanted.isdigit():
            raise unworded(f'parsing resource version "{wanted}": invalid syntax')
        self._version = int(wanted)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the response until the timeout.

        If changes after the watch's version were discarded, the last line is an error.
        """
        try:
            for line in self._initial():
                yield line
            async for line in self._following():
                yield line
        except ApiError as error:
            yield _line("ERROR", error.status)

    def _initial(self) -> Iterator[bytes]:
        """Yield every object as ADDED, unless the request names a version from which to watch.

        With `sendInitialEvents`, yield every object in any case, then a bookmark that marks the
        end.
        """
        if self._version and not self._sends_initial:
            return
        current = self._collection.versions.current
        if self._version > current:
            raise too_new(self._version, current)
        for item in self._collection.items():
            if self._selector(item):
                yield _line("ADDED", item)
        self._version = current
        if self._sends_initial and self._bookmarks:
            yield self._bookmark(annotations=_INITIAL_END)

    async def _following(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout_seconds
        bookmark_at = loop.time() + self._bookmark_seconds
        while loop.time() < end:
            # The ticket is taken before the changes are read, so that a write between the two is
            # not missed.
            ticket = self._collection.versions.ticket()
            for change in self._collection.changes_after(self._version):
                self._version = change.version
                if line := self._event(change):
                    yield line
            if self._bookmarks and loop.time() >= bookmark_at:
                # A bookmark has the server's version, not the version of the last change. Watches
                # therefore stay recent even if their objects do not change.
                self._version = max(self._version, self._collection.versions.current)
                yield self._bookmark()
                bookmark_at = loop.time() + self._bookmark_seconds
            await self._collection.versions.wait(ticket, min(end, bookmark_at) - loop.time())

    def _event(self, change: StoredChange) -> bytes | None:
        """Return the line of a change; `None` if the selector did not match and still does not.

        An object that starts to match is ADDED; an object that no longer matches is DELETED.
        """
        before = change.before is not None and self._selector(change.before)
        after = change.after is not None and self._selector(change.after)
        if change.after is not None and after:
            return _line("MODIFIED" if before else "ADDED", change.after)
        if change.before is not None and before:
            metadata = {**change.before["metadata"], "resourceVersion": str(change.version)}
            return _line("DELETED", {**change.before, "metadata": metadata})
        return None

    def _bookmark(self, annotations: dict[str, str] | None = None) -> bytes:
        # Real servers encode Go's zero values in this way, as nulls and empty fields.
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
