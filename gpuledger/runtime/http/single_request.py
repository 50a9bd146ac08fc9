"""Sends one HTTPS request over a new connection, with h11, which every component has.

This is for rare requests in components without an HTTP library: for a token or the kubelet's pods.
A request neither uses a proxy nor follows redirects, because only the server in its URL may receive
it. The answer's size is limited. The caller sets the deadline.
"""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import h11

_MAX_HEAD_BYTES: Final = 16 * 1024
_PIECE_BYTES: Final = 64 * 1024


async def request_once(
    method: str,
    url: str,
    headers: Mapping[str, str],
    *,
    context: ssl.SSLContext,
    max_bytes: int,
    body: bytes = b"",
    server_name: str | None = None,
) -> tuple[int, bytes]:
    """Return the status and the whole body of the answer, for any status.

    The certificate must contain `server_name`, which defaults to the URL's host. Raises `OSError`,
    h11's errors, and `ValueError` if there is no answer or its body exceeds `max_bytes`. No message
    contains the address.
    """
    parts = urlsplit(url)
    query = f"?{parts.query}" if parts.query else ""
    length = [("Content-Length", str(len(body)))] if body else []
    request = h11.Request(
        method=method,
        target=f"{parts.path or '/'}{query}",
        headers=[("Host", parts.netloc), *length, ("Connection", "close"), *headers.items()],
    )
    exchange = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
    sent: list[h11.Event] = [request, h11.EndOfMessage()]
    if body:
        sent.insert(1, h11.Data(body))
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or 443, ssl=context, server_hostname=server_name
    )
    try:
        writer.write(b"".join(filter(None, map(exchange.send, sent))))
        return await _read_answer(exchange, reader, max_bytes)
    finally:
        writer.transport.abort()


async def _read_answer(
    exchange: h11.Connection, reader: asyncio.StreamReader, max_bytes: int
) -> tuple[int, bytes]:
    status, body = 0, bytearray()
    while True:
        match exchange.next_event():
            case h11.NEED_DATA:
                data = await reader.read(_PIECE_BYTES)
                if not data and not status:
                    raise ValueError("closed the connection without an answer")
                exchange.receive_data(data)
            case h11.Response() as response:
                status = response.status_code
            case h11.Data() as part:
                body += part.data
                if len(body) > max_bytes:
                    raise ValueError(f"answered with more than {max_bytes // 1024} KiB")
            case h11.EndOfMessage():
                return status, bytes(body)
            case _:  # an informational response; the deadline ends an endless series of them
                pass
