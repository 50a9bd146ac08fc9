"""The requests about one kind of object, from HTTP to the store and back.

Here live parameters and bodies. Routes and sockets are `server`'s business.
"""

from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from simulator.kube import failures
from simulator.kube.lists import list_objects
from simulator.kube.selectors import Selector, parse_selectors
from simulator.kube.store import Collection, Json, Key
from simulator.kube.writes import create_object, delete_object, patch_object, patch_status

Stream = Callable[[web.Request, Collection, Selector], Awaitable[web.StreamResponse]]


class KubeRequests:
    """The requests about one kind of object."""

    def __init__(
        self,
        collection: Collection,
        stream: Stream,
    ) -> None:
        self._collection = collection
        self._stream = stream

    async def read_many(self, request: web.Request) -> web.StreamResponse:
        """List or watch."""
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
        """Merge into metadata and spec."""
        return answer(patch_object(self._collection, _key(request), await _body(request)))

    async def patch_status(self, request: web.Request) -> web.Response:
        """Merge into the status."""
        return answer(patch_status(self._collection, _key(request), await _body(request)))

    async def delete(self, request: web.Request) -> web.Response:
        """Delete; the grace period stands in the query or in the body."""
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
        raise failures.bad_request(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise failures.bad_request("the body is no object")
    return body


def answer(item: Json, code: int = 200) -> web.Response:
    """Return an object as JSON."""
    return web.Response(body=orjson.dumps(item), status=code, content_type="application/json")
