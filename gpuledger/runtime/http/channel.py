"""A connection's bytes, in the clear or within TLS. How long to wait for them is the caller's.

TLS runs between two buffers in memory and not in asyncio's transport: that sets 256 KiB aside for
each connection before its client has said a word, ten times of what OpenSSL itself needs.
"""

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from typing_extensions import override

READ_BYTES: Final = 16_384
_PIECE_BYTES: Final = 65_536


class Channel:
    """A connection in the clear."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # Written is what the client's machine has taken: nothing waits here for one that does not.
        writer.transport.set_write_buffer_limits(high=0)

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The client's certificate; empty where it has shown none."""
        return {}

    async def open(self) -> None:
        """Agree with the client on what is spoken. Raises OSError."""

    async def read(self) -> bytes:
        """Return what has come; nothing where the client has ended. Raises OSError."""
        return await self._reader.read(READ_BYTES)

    async def write(self, data: bytes) -> None:
        """Send, and wait until all of it is taken. Raises OSError."""
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """End the connection, without waiting for a client that does not take what was sent."""
        transport = self._writer.transport
        transport.close()
        if transport.get_write_buffer_size():
            transport.abort()

    def abort(self) -> None:
        """End the connection at once: who reads finds its end, who writes an OSError."""
        self._writer.transport.abort()


class TlsChannel(Channel):
    """A connection within TLS, as its server."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
    ) -> None:
        super().__init__(reader, writer)
        self._context = context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None

    @property
    @override
    def certificate(self) -> Mapping[str, Any]:
        return (self._tls and self._tls.getpeercert()) or {}

    @override
    async def open(self) -> None:
        # Of a client that says nothing OpenSSL need not know.
        await self._receive()
        self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        while not await self._has_agreed(self._tls):
            await self._receive()

    @override
    async def read(self) -> bytes:
        tls = self._require_open()
        while True:
            try:
                return tls.read(READ_BYTES)
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._receive():
                    return b""

    @override
    async def write(self, data: bytes) -> None:
        tls = self._require_open()
        for start in range(0, len(data), _PIECE_BYTES):
            tls.write(data[start : start + _PIECE_BYTES])
            await self._flush()

    @override
    def close(self) -> None:
        if self._tls is not None and not self._writer.is_closing():
            with suppress(ssl.SSLError):  # the client's own farewell is not waited for
                self._tls.unwrap()
            self._writer.write(self._outgoing.read())
        super().close()

    async def _has_agreed(self, tls: ssl.SSLObject) -> bool:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        else:
            return True
        finally:
            await self._flush()  # of a handshake that failed too: that says to the client why

    async def _receive(self) -> bool:
        """Take what has come; return whether anything has. Raises OSError during the handshake."""
        data = await super().read()
        if not data and self._tls is None:
            raise ConnectionResetError
        self._incoming.write(data)
        return bool(data)

    async def _flush(self) -> None:
        await super().write(self._outgoing.read())

    def _require_open(self) -> ssl.SSLObject:
        if self._tls is None:
            raise ConnectionError("not open")
        return self._tls
