"""Leases as an API server keeps them: created once, changed only with the newest version."""

import json
from collections import deque

from aiohttp import web

from tests.unit.enricher.podwatch.builders import Object, encoded
from tests.unit.enricher.podwatch.misbehaving import Answering, status

FOLDER = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


class LeaseShelf:
    """Leases by path; scripted answers come first."""

    def __init__(self) -> None:
        self.kept: dict[str, Object] = {}
        self.script: deque[Answering] = deque()
        self.requests: list[str] = []
        self._version = 100

    def serve(self, app: web.Application) -> None:
        app.router.add_route("*", FOLDER, self._answer)
        app.router.add_route("*", FOLDER + "/{name}", self._answer)

    def put(self, path: str, lease: Object) -> None:
        """Keep a lease with the next version."""
        self._version += 1
        lease["metadata"]["resourceVersion"] = str(self._version)
        self.kept[path] = lease

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.method)
        if self.script:
            return await self.script.popleft()(request)
        match request.method:
            case "GET" if request.path in self.kept:
                return web.Response(body=encoded(self.kept[request.path]))
            case "POST":
                return await self._create(request)
            case "PUT" if request.path in self.kept:
                return await self._update(request)
        return await status(404, reason="NotFound")(request)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        lease: Object = json.loads(await request.read())
        path = f"{request.path}/{lease['metadata']['name']}"
        if path in self.kept:
            return await status(409, reason="AlreadyExists")(request)
        self.put(path, lease)
        return web.Response(status=201, body=encoded(lease))

    async def _update(self, request: web.Request) -> web.StreamResponse:
        lease: Object = json.loads(await request.read())
        kept = self.kept[request.path]["metadata"]["resourceVersion"]
        if lease["metadata"]["resourceVersion"] != kept:
            return await status(409, reason="Conflict")(request)
        self.put(request.path, lease)
        return web.Response(body=encoded(lease))
