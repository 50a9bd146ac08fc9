"""The list of pods at the kubelet's HTTPS port; a test decides who is authorized."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.real.services.certificates import KeyPair

Json = dict[str, Any]


def pod(uid: str, *, node: str = "node-1", **labels: str) -> Json:
    """Return a pod in the kubelet's list format, without the type that only single objects have."""
    return {
        "metadata": {
            "name": f"pod-of-{uid}",
            "namespace": "research",
            "uid": uid,
            "creationTimestamp": "2026-03-01T12:00:00Z",
            **({"labels": labels} if labels else {}),
            "annotations": {"kubernetes.io/config.source": "api"},
        },
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "img:1"}]},
        "status": {"phase": "Running", "qosClass": "BestEffort"},
    }


def pod_list(*pods: Json) -> Json:
    """Return a list as Go encodes it: without items if it is empty."""
    return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": list(pods) or None}


class FakeKubeletApi:
    """The port's next response, and the requests that it received."""

    def __init__(self, answer: Json | None = None) -> None:
        self.answer: Json = pod_list() if answer is None else answer
        """The JSON body of the response to an authorized request."""
        self.authorize: Callable[[str], tuple[int, str]] = lambda _token: (200, "")
        """Takes a token; returns a status, and a text if it is not a success."""
        self.raw: bytes | None = None
        """Sent instead of a response, unchanged."""
        self.closes = False
        """Whether to close the connection after the response."""
        self.hangs = False
        self.requests: list[tuple[str, dict[str, str]]] = []
        """The first line and the headers of each request."""

    @asynccontextmanager
    async def serve(self, pair: KeyPair) -> AsyncIterator[int]:
        """Serve over TLS with a certificate; yield the port on 127.0.0.1."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair.certificate, pair.key)
        serving: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                serving.add(task)
            # asyncio logs a cancelled handler as an error.
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._handle(reader, writer)
            writer.transport.abort()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *others = head.split("\r\n")
        lines = [line.partition(":") for line in others if line]
        headers = {name.lower(): value.strip() for name, _, value in lines}
        self.requests.append((first, headers))
        if self.hangs:
            await asyncio.Event().wait()
        if self.raw is None:
            token = headers.get("authorization", "").removeprefix("Bearer ")
            # In a thread, because it may query the API server.
            status, text = await asyncio.to_thread(self.authorize, token)
            if not first.startswith("GET /pods HTTP/"):
                status, text = 404, "404 page not found"
            body = json.dumps(self.answer).encode() if status == 200 else text.encode()
            answer = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        else:
            answer = self.raw
        writer.write(answer)
        await writer.drain()
        if self.closes:
            writer.close()
            await writer.wait_closed()
        # Until the client has read everything and closed: closing earlier might lose bytes.
        await reader.read()
