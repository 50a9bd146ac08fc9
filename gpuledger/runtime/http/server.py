"""The HTTP/1.1 server: uvicorn's protocol over h11, with limits on waiting connections.

`uvicorn.Server` is not used: it wakes ten times a second, handles signals, and exits the process if
the address is in use. It neither limits connections before their TLS handshake nor replaces the TLS
context while it listens.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, cast

from typing_extensions import override
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from gpuledger.runtime.http.asgi import AsgiApp
from gpuledger.runtime.tasks import end_tasks

HEAD_SECONDS: Final = 10.0
"""Timeout of a TLS handshake and a complete request."""
IDLE_SECONDS: Final = 75
"""Timeout between two requests; longer than a scrape interval, so that scrapers can reuse
connections."""
MAX_WAITING: Final = 32
"""Maximum number of connections that wait for their clients; a TLS connection takes 0.3 MiB."""
_MAX_HEAD_BYTES: Final = 16_384
_ENDING_SECONDS: Final = 1.0


@asynccontextmanager
async def serve(
    app: AsgiApp,
    *,
    host: str,
    port: int,
    context: Callable[[], ssl.SSLContext | None] | None = None,
) -> AsyncIterator[tuple[str, int]]:
    """Serve while the context is open; yields the bound host and port.

    `context` is called for each connection, so that the next one uses new certificates; it returns
    `None` for plain HTTP. Raises `OSError` if the server cannot listen on the address.
    """
    config = Config(
        cast("Any", app),  # uvicorn's types of messages and scopes are narrower than ASGI's
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",  # the application logs its own errors; bad requests are the client's
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
    )
    config.load()
    state = ServerState()
    waiting: dict[ClientConnection, None] = {}
    server = await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(config, state, context, waiting), host, port
    )
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield host, port
    finally:
        server.close()
        for connection in list(state.connections):
            cast("ClientConnection", connection).abort()
        await end_tasks(*state.tasks, seconds=_ENDING_SECONDS)


class ClientConnection(H11Protocol):
    """A connection to a client.

    If too many connections wait for their clients, a new connection replaces the one that has
    waited longest. A connection waits from its start, or the end of an answer, until it has a
    complete request, and while its client does not read an answer. Connections that are being
    answered are not replaced.

    asyncio accepts many connections before it reads from the first. A plain connection is therefore
    replaced only after the event loop has read the request that it may have brought. Otherwise, a
    burst of requests, as from an ingress, would be cut off. A TLS connection is replaced at once,
    because its handshake takes several reads and much memory.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        context: Callable[[], ssl.SSLContext | None] | None,
        waiting: "dict[ClientConnection, None]",
    ) -> None:
        """Take the server's waiting connections, ordered by waiting time, the longest first."""
        super().__init__(config, state, app_state={})
        self._context, self._waiting = context, waiting
        self._wire: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = self._is_read = self._has_tls = False
        self._early = b""

    def abort(self) -> None:
        """Close the connection without waiting for the client."""
        self._work()
        if self._wire is not None:
            self._wire.abort()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self._wire = transport
        self.connections.add(self)
        context = self._context() if self._context else None
        self._has_tls = context is not None
        self._wait(HEAD_SECONDS)
        if context is None:
            self._begin(transport)
        else:
            task = self.loop.create_task(self._start_tls(transport, context))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    @override
    def data_received(self, data: bytes) -> None:
        if not self._is_open:  # the client sent the data together with the end of the handshake
            self._early += data
            return
        super().data_received(data)
        self._follow()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._follow()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._follow()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        self._work()
        if self._is_open:
            super().connection_lost(exc)

    def _begin(self, transport: asyncio.Transport) -> None:
        self._is_open = True
        super().connection_made(transport)

    async def _start_tls(self, wire: asyncio.Transport, context: ssl.SSLContext) -> None:
        transport: asyncio.Transport | None = None
        with suppress(OSError):  # an invalid handshake, or the client has disconnected
            if not wire.is_closing():  # otherwise asyncio would wait until the timeout
                transport = await self.loop.start_tls(
                    wire, self, context, server_side=True, ssl_handshake_timeout=HEAD_SECONDS
                )
        if transport is None:
            self.connection_lost(None)  # asyncio calls this only after a successful handshake
            return
        self.app_state = {"certificate": transport.get_extra_info("peercert")}
        self._begin(transport)
        if self._early:
            self.data_received(self._early)

    def _follow(self) -> None:
        """Record whether the connection waits for its client or is being answered."""
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        is_answered = cycle is not None and not cycle.response_complete
        if is_answered and not self.flow.write_paused:
            self._work()
        elif self not in self._waiting and self in self.connections:
            self._wait(IDLE_SECONDS + HEAD_SECONDS)

    def _wait(self, seconds: float) -> None:
        self._waiting[self] = None
        self._timer = self.loop.call_later(seconds, self.abort)
        self._is_read = False
        if not self._has_tls:
            # A call that is scheduled by a scheduled call runs after the loop has received data.
            self.loop.call_soon(self.loop.call_soon, self._make_room)
            return
        self._make_room()

    def _make_room(self) -> None:
        """Allow this connection to be replaced, and replace those that have waited longest."""
        self._is_read = True
        while len(self._waiting) > MAX_WAITING:
            longest = next(iter(self._waiting))
            if not longest._is_read:  # noqa: SLF001  # another connection
                break
            longest.abort()

    def _work(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
