"""An HTTP server that answers with any bytes that a test gives, valid or not."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

MIB = 2**20
_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\n"


@dataclass(frozen=True, kw_only=True)
class Raw:
    """The bytes of a response: the beginning, then a part that repeats."""

    begin: bytes
    again: bytes = b""
    times: int = 0


def page(body: bytes, *headers: bytes, status: bytes = _UNAVAILABLE) -> Raw:
    """Return a complete response."""
    lines = b"".join(b"%s\r\n" % line for line in headers)
    return Raw(begin=b"%s%sContent-Length: %d\r\n\r\n%s" % (status, lines, len(body), body))


def packed_zeros(size_bytes: int) -> bytes:
    """Return gzip data of this many zeros; it is about a thousandth of their size."""
    packer = zlib.compressobj(9, wbits=31)
    packed = [packer.compress(bytes(MIB)) for _ in range(size_bytes // MIB)]
    return b"".join([*packed, packer.flush()])


ODD_PAGES: dict[str, Raw] = {
    "Latin-1 declared as UTF-8": page(b"caf\xe9", b"Content-Type: text/html; charset=utf-8"),
    "an unknown charset": page(b"down", b"Content-Type: text/html; charset=klingon"),
    "a charset that rejects everything": page(
        b"down", b"Content-Type: text/html; charset=undefined"
    ),
    "a charset that is not text": page(b"down", b"Content-Type: text/html; charset=base64"),
    "a charset for host names": page(b"\xff" * 99, b"Content-Type: text/html; charset=idna"),
    "an invalid content type": page(b"down", b"Content-Type: \xff;;=\xfe"),
    "control characters": page(b"\x1b[2Jdown\0"),
    "a date outside the calendar": page(
        b"down", b"Retry-After: Sat, 21 Nov 99999999999999999999 12:00:30 GMT"
    ),
    "an impossible time zone": page(
        b"down", b"Retry-After: Sat, 21 Nov 2026 12:00:30 -99999999999999999999"
    ),
    "a Retry-After in Latin-1": page(b"down", b"Retry-After: \xff\xfe"),
    "a reason in Latin-1": Raw(begin=b"HTTP/1.1 503 \xff\xfe\r\nContent-Length: 0\r\n\r\n"),
    "invalid gzip": page(b"junk", b"Content-Encoding: gzip"),
    "invalid deflate": page(b"junk", b"Content-Encoding: deflate"),
    "an unavailable encoding": page(b"junk", b"Content-Encoding: br"),
    "an unknown encoding": page(b"junk", b"Content-Encoding: \xff\xfe"),
    "a truncated body": Raw(begin=_UNAVAILABLE + b"Content-Length: 99\r\n\r\ndown"),
    "an invalid cookie": page(b"down", b'Set-Cookie: a\xff="; b=c'),
}
"""Responses of status 503 in which everything except the status is invalid."""

HUGE_PAGES: dict[str, Raw] = {
    "300 MiB": Raw(begin=_UNAVAILABLE + b"\r\n", again=b"x" * MIB, times=300),
    "300 MiB in gzip": page(packed_zeros(300 * MIB), b"Content-Encoding: gzip"),
    "300 MiB in deflate": page(zlib.compress(bytes(300 * MIB), 9), b"Content-Encoding: deflate"),
}
"""Responses of status 503 that are larger than a sink's memory."""

NO_HTTP: dict[str, Raw] = {
    "a status that is not a number": Raw(begin=b"HTTP/1.1 5\xff\xfe\r\nContent-Length: 0\r\n\r\n"),
    "another protocol": Raw(begin=b"SSH-2.0-OpenSSH_9.6\r\n"),
    "nothing": Raw(begin=b""),
    "endless headers": Raw(begin=_UNAVAILABLE, again=b"a: b\r\n" * 9999, times=9999),
    "an endless status line": Raw(begin=b"HTTP/1.1 503 ", again=b"b" * 65_536, times=9999),
    "bytes that are not text": Raw(begin=b"\xff\0\xfe\x1b" * 99 + b"\r\n\r\n"),
}
"""Responses that are not HTTP."""


@dataclass
class HostileServer:
    """Sends responses in order and repeats the last one."""

    answers: list[Raw]
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    """The bodies that it received."""
    heads: list[bytes] = field(default_factory=list)
    """The heads of the requests, in lower case."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request and answer it."""
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            self.heads.append(head)
            size = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self.bodies.append(await reader.readexactly(int(size or b"0")))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            writer.write(answer.begin)
            for _ in range(answer.times):
                writer.write(answer.again)
                await writer.drain()
            await writer.drain()
        writer.close()


@asynccontextmanager
async def answering(answers: Iterable[Raw]) -> AsyncIterator[HostileServer]:
    """Serve these responses, each over its own connection, while the context is open."""
    hostile = HostileServer(answers=list(answers))
    tasks: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(hostile.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    hostile.url = f"http://{host}:{port}"
    try:
        yield hostile
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
