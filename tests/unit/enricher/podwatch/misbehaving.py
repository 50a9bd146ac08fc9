"""An API server over real HTTP that follows the test's script, one answer per request.

Lists, watches and lists that come as a watch (initials) have a script each. When a script has
ended, a list is empty, a watch is silent, and a list that comes as a watch is refused as if the
server did not support it.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
from aiohttp import web

from gpuledger_enricher.podwatch.api import KubernetesError
from gpuledger_enricher.podwatch.kinds import PENDING_POD
from tests.unit.enricher.podwatch.builders import Object, encoded

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MisbehavingServer:
    """Plays its scripts for pods with a node and records their requests.

    Other kinds have no scripts. A list of them returns `others`, and a watch of them is silent;
    `refused` answers instead of both.
    """

    def __init__(self) -> None:
        self.url = ""
        self.lists: deque[Answering] = deque()
        self.watches: deque[Answering] = deque()
        self.initials: deque[Answering] = deque()
        self.requests: list[Mapping[str, str]] = []
        self.tokens: list[str] = []
        self.agents: set[str] = set()
        self.others: dict[str, list[Object]] = {"nodes": [], "namespaces": []}
        self.refused: dict[str, Answering] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Play the next answer of the script for this kind of request."""
        if request.query.get("fieldSelector") == PENDING_POD.selector["fieldSelector"]:
            return await self.answer_others(request, plural=PENDING_POD.plural)
        if "sendInitialEvents" in request.query and not self.initials:
            return await status(422, reason="Invalid")(request)
        self.requests.append(dict(request.query))
        self.agents.add(request.headers.get("User-Agent", ""))
        self.tokens.append(request.headers.get("Authorization", ""))
        if "sendInitialEvents" in request.query:
            return await self.initials.popleft()(request)
        if "watch" in request.query:
            return await (self.watches.popleft() if self.watches else silence())(request)
        return await (self.lists.popleft() if self.lists else page())(request)

    async def answer_others(self, request: web.Request, *, plural: str = "") -> web.StreamResponse:
        """Answer for pending pods, nodes and namespaces."""
        plural = plural or request.path.rpartition("/")[2]
        if plural in self.refused:
            return await self.refused[plural](request)
        if "sendInitialEvents" in request.query:
            return await status(422, reason="Invalid")(request)
        found = self.others.get(plural, [])
        return await (silence() if "watch" in request.query else page(*found))(request)

    def serve(self, app: web.Application) -> None:
        """Add its routes."""
        app.router.add_get("/api/v1/pods", self.answer)
        for plural in ("nodes", "namespaces"):
            app.router.add_get(f"/api/v1/{plural}", self.answer_others)

    def kinds(self) -> list[str]:
        """Return the requests as `list`, `watch` and `initial`, in order."""
        return [_kind(query) for query in self.requests]


def _kind(query: Mapping[str, str]) -> str:
    if "sendInitialEvents" in query:
        return "initial"
    return "watch" if "watch" in query else "list"


@asynccontextmanager
async def misbehaving_server() -> AsyncIterator[MisbehavingServer]:
    """Serve on a free port of the loopback address."""
    server = MisbehavingServer()
    app = web.Application()
    server.serve(app)
    async with serving(app) as server.url:
        yield server


@asynccontextmanager
async def serving(
    app: web.Application, *, context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve an application on a free port of the loopback address; yield its URL."""
    # Silent watches are cancelled with the server, not waited for.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"{'https' if context else 'http'}://{host}:{port}"
    finally:
        await runner.cleanup()


def page(*pods: Object, version: str = "10", continue_token: str = "") -> Answering:
    """Answer a list with one page."""
    metadata = {"resourceVersion": version, "continue": continue_token}

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=encoded({"metadata": metadata, "items": pods}))

    return answer


def status(code: int, *, reason: str = "", retry_after: str = "", **more: object) -> Answering:
    """Refuse with a Status object."""
    body = {"kind": "Status", "code": code, "reason": reason, "message": f"says {code}", **more}
    headers = {"Retry-After": retry_after} if retry_after else {}

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=code, body=encoded(body), headers=headers)

    return answer


def text(code: int, body: str) -> Answering:
    """Answer in plain text, as a proxy in front of the API server would."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=code, text=body)

    return answer


def events(*items: Object, tail: bytes = b"", cut: bool = False, keep: bool = False) -> Answering:
    """Answer a watch with these lines and a tail; then close, cut or keep the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"".join(encoded(item) + b"\n" for item in items) + tail)
        if keep:
            await asyncio.Event().wait()
        if cut and request.transport:
            request.transport.abort()
        return response

    return answer


def halves(first: Object, second: Object, *, go_on: asyncio.Event) -> Answering:
    """Answer a watch with one line, and with another on request; then keep it open."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(encoded(first) + b"\n")
        await go_on.wait()
        await response.write(encoded(second) + b"\n")
        await asyncio.Event().wait()
        return response

    return answer


def silence() -> Answering:
    """Accept a watch and never send anything."""
    return events(keep=True)


def mute() -> Answering:
    """Accept a request and never answer, not even with a status."""

    async def answer(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("the wait has no end")

    return answer


def trickle(drop: bytes) -> Answering:
    """Answer with the same few bytes again and again, forever."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(drop)
                await asyncio.sleep(0.005)
        return response

    return answer


def event(kind: str, item: Object) -> Object:
    """Return one line of a watch."""
    return {"type": kind, "object": item}


def bookmark(version: str, **metadata: object) -> Object:
    """Return a bookmark as a real server writes it: a pod without containers."""
    return event(
        "BOOKMARK",
        {
            "metadata": {"resourceVersion": version, **metadata},
            "spec": {"containers": None},
            "status": {},
        },
    )


def end_mark(version: str) -> Object:
    """Return the bookmark that ends a list which comes as a watch."""
    return bookmark(version, annotations={"k8s.io/initial-events-end": "true"})


def error(code: int, reason: str = "", **more: object) -> Object:
    """Return an ERROR line."""
    status_object = {"kind": "Status", "code": code, "reason": reason, "message": "no"}
    return event("ERROR", status_object | more)


@contextmanager
def refused(code: int) -> Iterator[None]:
    """Expect that the server refuses with this status while the context is open."""
    with pytest.raises(KubernetesError) as caught:
        yield
    assert caught.value.status == code
