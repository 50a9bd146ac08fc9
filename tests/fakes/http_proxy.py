"""A small HTTP proxy: it tunnels CONNECT and forwards plain requests to an address of the test."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator


@dataclass
class HttpProxy:
    """How to treat the next connection, and the requests received so far."""

    leads_to: str = ""
    """The address to which it forwards every host, `http://127.0.0.1:port`."""
    login: str = ""
    """Required credentials as `user:password`; others get a 407. Empty allows everyone."""
    raw: bytes | None = None
    """Sent instead of a response to the request; then the connection is closed."""
    hangs: bool = False
    url: str = ""
    requests: list[str] = field(default_factory=list)
    """The first line of each request."""
    logins: list[str] = field(default_factory=list)
    """The `Proxy-Authorization` header of each request; empty if it has none."""

    serving: set[asyncio.Task[None]] = field(default_factory=set)

    def end_connections(self) -> None:
        """Break all open connections."""
        for task in self.serving:
            task.cancel()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        self.requests.append(line)
        self.logins.append(headers.get("proxy-authorization", ""))
        if self.hangs:
            await asyncio.Event().wait()
        wanted = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        raw = self.raw
        if self.login and self.logins[-1] != wanted:
            raw = b"HTTP/1.1 407 Who Are You\r\nContent-Length: 0\r\n\r\n"
        if raw is not None:
            writer.write(raw)
            await writer.drain()
            return
        there = urlsplit(self.leads_to)
        reader_there, writer_there = await asyncio.open_connection(there.hostname, there.port)
        try:
            if line.startswith("CONNECT "):
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:  # the receiver accepts an absolute URL as well
                writer_there.write(head)
            ways = [
                asyncio.create_task(_pump(reader, writer_there)),
                asyncio.create_task(_pump(reader_there, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            writer_there.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def proxying(
    leads_to: str, *, login: str = "", context: ssl.SSLContext | None = None
) -> AsyncIterator[HttpProxy]:
    """Serve a proxy; with a context, over TLS."""
    proxy = HttpProxy(leads_to=leads_to, login=login)
    serving = proxy.serving

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            serving.add(task)
        # asyncio logs a cancelled handler as an error.
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await proxy.handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    proxy.url = f"{'https' if context else 'http'}://127.0.0.1:{port}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.end_connections()
        await asyncio.gather(*serving, return_exceptions=True)
