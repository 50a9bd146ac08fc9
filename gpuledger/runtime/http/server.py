"""Pages over HTTP/1.1: GET and HEAD, a few at a time, nothing to be sent to it.

Here lives how long a client is waited for, and how many of them at once. Each of these bounds keeps
a bad client from costing others their answer: a connection that waits on its client can be
displaced by the next one, so that whatever is open, a probe has a slot.

A slot is held by a connection that is being answered, which must be left to it, or by one that
waits on its client: to send, or to take what it asked for. None that waits is worth more than the
next one, which may be a probe. One address may hold so many and no more; where all slots are
taken, one of the address that holds the most is given up, so that a flood displaces itself first.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, Generic, TypeVar

import structlog

from gpuledger.runtime.http.exchange import (
    READ_BYTES,
    BadRequestError,
    Channel,
    Exchange,
    Handler,
    HttpRequest,
    Response,
    TlsChannel,
    refusal,
)
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.process_metrics import Dropped, count_dropped
from gpuledger.runtime.tasks import end_tasks

H = TypeVar("H")
HANDSHAKE_SECONDS: Final = 2.0
HEAD_SECONDS: Final = 10.0
# Longer than scrapes are apart, so that a scraper keeps its connection.
IDLE_SECONDS: Final = 75.0
ANSWER_SECONDS: Final = 30.0
MAX_CONNECTIONS: Final = 100
MAX_CONNECTIONS_PER_ADDRESS: Final = 32
"""Far more than a scraper or a proxy beside the deployable needs."""
MAX_PAGES: Final = 16
"""How many pages may be made at once; all other slots are kept for probes, which are no pages."""
MAX_ANSWERS: Final = 8
"""How many large answers may wait for their clients: each is held in memory until it is taken."""
MAX_ANSWERS_PER_ADDRESS: Final = 4
_LARGE_BYTES: Final = 16_384
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()
_IPV6_NETWORK_BYTES: Final = 8


class ConnectionSlots(Generic[H]):
    """The slots of one kind, and their holders."""

    def __init__(self, *, max_total: int, max_per_address: int) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._addresses: dict[H, str] = {}
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, dict[H, None]] = {}

    def __len__(self) -> int:
        """Return how many are held."""
        return len(self._addresses)

    def find_displaced(self, address: str) -> H | None:
        """Return the connection to displace for a new one; `None` where one is free.

        Raises LookupError where all of those who could go are at work.
        """
        if self._held[address] >= self._max_per_address:
            busiest = address
        elif len(self._addresses) >= self._max_total:
            busiest = max(self._waiting, key=self._held.__getitem__, default=address)
        else:
            return None
        longest = next(iter(self._waiting.get(busiest, ())), None)
        if longest is None:
            raise LookupError("nobody waits")
        return longest

    def enter(self, holder: H, address: str) -> None:
        """Record that a holder has a slot, where it waits from now on."""
        self._addresses[holder] = address
        self._held[address] += 1
        self.wait(holder)

    def wait(self, holder: H) -> None:
        """Record that it waits on its client from now on, where it has a slot still."""
        if (address := self._addresses.get(holder)) is not None:
            self._stop_waiting(holder, address)
            self._waiting.setdefault(address, {})[holder] = None

    def work(self, holder: H) -> None:
        """Record that it works and is to be left to it, where it has a slot still."""
        if (address := self._addresses.get(holder)) is not None:
            self._stop_waiting(holder, address)

    def leave(self, holder: H) -> None:
        """Free its slot, where it has one."""
        if (address := self._addresses.pop(holder, None)) is not None:
            self._stop_waiting(holder, address)
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

    def _stop_waiting(self, holder: H, address: str) -> None:
        waiting = self._waiting.get(address, {})
        waiting.pop(holder, None)
        if not waiting:
            self._waiting.pop(address, None)


def client_of(host: str) -> str:
    """Return the address by which a client is counted: of IPv6, its network of 64 bits.

    Whoever has one address of such a network has all of them.
    """
    if ":" not in host:
        return host
    bare, _, _ = host.partition("%")
    return socket.inet_pton(socket.AF_INET6, bare)[:_IPV6_NETWORK_BYTES].hex()


@asynccontextmanager
async def serve_pages(
    handler: Handler,
    *,
    host: str,
    port: int,
    context: Callable[[], ssl.SSLContext] | None = None,
    probes: Collection[str] = (),
) -> AsyncIterator[tuple[str, int]]:
    """Serve while the context is open; yields the bound host and port.

    `context` is asked for each connection, so that a new one counts from the next connection on;
    `probes` are paths that are answered however many other pages are being made. Raises OSError
    where the address cannot be listened on.
    """
    connections = _Connections(handler, context=context, probes=probes)
    server = await asyncio.start_server(connections.accept, host, port, limit=READ_BYTES)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield host, port
    finally:
        server.close()
        await connections.end()


class _Connections:
    """The open connections, each a task."""

    def __init__(
        self,
        handler: Handler,
        *,
        context: Callable[[], ssl.SSLContext] | None,
        probes: Collection[str],
    ) -> None:
        self._handler = handler
        self._context = context
        self._probes = probes
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots: ConnectionSlots[Channel] = ConnectionSlots(
            max_total=MAX_CONNECTIONS, max_per_address=MAX_CONNECTIONS_PER_ADDRESS
        )
        self._answers: ConnectionSlots[Channel] = ConnectionSlots(
            max_total=MAX_ANSWERS, max_per_address=MAX_ANSWERS_PER_ADDRESS
        )
        self._pages = 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection if there is a slot for it, before anything is read of it."""
        peer = writer.get_extra_info("peername") or ("",)
        address = client_of(peer[0])
        channel = (
            TlsChannel(reader, writer, self._context())
            if self._context
            else Channel(reader, writer)
        )
        if not _make_room(self._slots, address):
            count_dropped(Dropped.NO_PLACE)
            channel.abort()
            return
        self._slots.enter(channel, address)
        task = asyncio.create_task(self._serve(channel, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """End all of them now."""
        await end_tasks(*self._tasks)

    async def _serve(self, channel: Channel, address: str) -> None:
        """Answer one request after the other until either side ends."""
        try:
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    await channel.open()
            except (TimeoutError, ssl.SSLError):
                count_dropped(Dropped.HANDSHAKE)
                return
            await self._answer_all(channel, address)
        except TimeoutError:
            count_dropped(Dropped.LATE)
            channel.abort()
        except OSError:
            pass  # the client is gone
        finally:
            channel.close()
            self._slots.leave(channel)

    async def _answer_all(self, channel: Channel, address: str) -> None:
        exchange, wait_seconds, stays = Exchange(), HEAD_SECONDS, True
        while stays:
            try:
                request = await _read(channel, exchange, wait_seconds=wait_seconds)
                if request is None:
                    return
                response = await self._answer(request, channel)
            except BadRequestError as error:
                is_method = error.status == HTTPStatus.METHOD_NOT_ALLOWED
                allowed = {"Allow": "GET, HEAD"} if is_method else {}  # RFC 9110 wants it there
                response = refusal(error.status, **allowed)
            await self._send(exchange.answer(response), channel, address)
            wait_seconds, stays = IDLE_SECONDS, exchange.stays()
            # Requests that came together need no waiting for, and would be answered in one go.
            await asyncio.sleep(0)

    async def _answer(self, request: HttpRequest, channel: Channel) -> Response:
        is_page = request.path not in self._probes
        if is_page and self._pages >= MAX_PAGES:
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, **{"Retry-After": "1"})
        self._pages += is_page
        self._slots.work(channel)
        try:
            return await self._handler(request)
        except Exception:  # noqa: BLE001  # a page's mistake is the page's alone
            if count := _repeats.count("page_failed"):
                _log.exception("page_failed", path=request.path, count=count)
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR)
        finally:
            self._pages -= is_page
            self._slots.wait(channel)

    async def _send(self, answer: bytes, channel: Channel, address: str) -> None:
        if len(answer) > _LARGE_BYTES:
            _make_room(self._answers, address)
            self._answers.enter(channel, address)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await channel.write(answer)
        finally:
            self._answers.leave(channel)


def _make_room(slots: ConnectionSlots[Channel], address: str) -> bool:
    """Displace the connection that has waited longest where no slot is free.

    Return whether a slot is free now.
    """
    try:
        displaced = slots.find_displaced(address)
    except LookupError:
        return False
    if displaced is not None:
        slots.leave(displaced)
        count_dropped(Dropped.DISPLACED)
        displaced.abort()
    return True


async def _read(channel: Channel, exchange: Exchange, *, wait_seconds: float) -> HttpRequest | None:
    """Return the next request; nothing where the client ends, or has nothing more to ask.

    Raises BadRequestError, OSError, and TimeoutError where a request does not come to its end.
    """
    certificate = channel.certificate
    if (request := exchange.next_request(certificate=certificate)) is not None:
        return request
    try:
        async with asyncio.timeout(wait_seconds):
            data = await channel.read()
    except TimeoutError:
        return None
    async with asyncio.timeout(HEAD_SECONDS):
        while data:
            exchange.receive(data)
            if (request := exchange.next_request(certificate=certificate)) is not None:
                return request
            data = await channel.read()
    return None
