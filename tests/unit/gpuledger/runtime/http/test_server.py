"""Scrapers and probes are answered, whatever other clients do and however many they are."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gpuledger.runtime.http import server
from gpuledger.runtime.http.exchange import Handler, HttpRequest, Response
from gpuledger.runtime.http.server import serve_pages
from tests.hanging import HANG_SECONDS

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = "GET /livez HTTP/1.1\nHost: a\n"
LARGE = b"x" * 8 * 2**20


async def echo(request: HttpRequest) -> Response:
    if request.path == "/bad":
        raise ValueError(request.path)
    if request.path == "/large":
        return Response(body=LARGE)
    if request.path == "/stuck":
        await asyncio.Event().wait()
    return Response(body=f"{request.method} {request.path}\n".encode())


@asynccontextmanager
async def serving(
    handler: Handler = echo,
) -> AsyncIterator[Callable[..., Awaitable[Connection]]]:
    """Serve pages; gives what connects to them, from any address of the loopback."""
    async with (
        serve_pages(handler, host="127.0.0.1", port=0, probes={"/livez"}) as (host, port),
        AsyncExitStack() as stack,
    ):

        async def connect(address: str = "127.0.0.1", *, sends: str = "") -> Connection:
            reader, writer = await asyncio.open_connection(host, port, local_addr=(address, 0))
            stack.callback(writer.close)
            writer.write(sends.replace("\n", "\r\n").encode())
            return reader, writer

        yield connect


@asynccontextmanager
async def talking() -> AsyncIterator[Connection]:
    async with serving() as connect:
        yield await connect()


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: str
) -> tuple[int, str]:
    """Send a request; gives status and body, which HEAD has none of."""
    writer.write(request.replace("\n", "\r\n").encode())
    async with asyncio.timeout(HANG_SECONDS):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().partition("content-length: ")[2].split()[0])
        body = b"" if request.startswith("HEAD") else await reader.readexactly(size)
    return int(head.split()[1]), body.decode()


async def test_one_connection_serves_one_request_after_the_other() -> None:
    async with talking() as (reader, writer):
        for path in ("/livez", "/metrics"):
            answer = await ask(reader, writer, f"GET {path}?x=1 HTTP/1.1\nHost: a\n\n")
            assert answer == (200, f"GET {path}\n")


async def test_head_gives_the_head_alone() -> None:
    async with talking() as (reader, writer):
        assert await ask(reader, writer, "HEAD /livez HTTP/1.1\nHost: a\n\n") == (200, "")
        assert await ask(reader, writer, "GET /livez HTTP/1.1\nHost: a\n\n") == (
            200,
            "GET /livez\n",
        )


async def test_a_page_that_fails_costs_neither_the_connection_nor_the_others() -> None:
    async with talking() as (reader, writer):
        assert (await ask(reader, writer, "GET /bad HTTP/1.1\nHost: a\n\n"))[0] == 500
        assert (await ask(reader, writer, "GET /livez HTTP/1.1\nHost: a\n\n"))[0] == 200


async def test_what_no_scraper_sends_is_refused_and_the_connection_ended() -> None:
    for request_head, status in (
        (f"{GET}A: b\n c\n\n", 400),
        ("POST / HTTP/1.1\nHost: a\n\n", 405),
    ):
        async with talking() as (reader, writer):
            assert (await ask(reader, writer, request_head))[0] == status
            async with asyncio.timeout(HANG_SECONDS):
                assert await reader.read() == b""


async def test_an_open_connection_does_not_hold_up_the_end() -> None:
    async with asyncio.timeout(HANG_SECONDS):
        async with talking() as (reader, writer):
            await ask(reader, writer, "GET / HTTP/1.1\nHost: a\n\n")
    gc.collect()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_an_open_connection_is_ended_without_an_error_in_the_log() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    async with talking() as (reader, writer):
        await ask(reader, writer, "GET /livez HTTP/1.1\nHost: a\n\n")
    for _ in range(3):
        await asyncio.sleep(0)

    assert complaints == []


STUCK = "GET /stuck HTTP/1.1\nHost: a\n\n"
UNREAD = "GET /large HTTP/1.1\nHost: a\n\n"
HELD: dict[str, str] = {
    "nothing": "",
    "half a request": "GET /metrics HTT",
    "an answer that is not read": UNREAD,
    "a page that is never made": STUCK,
}
"""What keeps a connection open, by what was sent over it."""


@pytest.mark.parametrize("sends", HELD.values(), ids=HELD)
@pytest.mark.parametrize("addresses", [1, 7])
async def test_whatever_holds_all_places_a_probe_is_answered(sends: str, addresses: int) -> None:
    async with serving() as connect:
        for number in range(2 * server.MAX_CONNECTIONS):
            await connect(f"127.0.0.{2 + number % addresses}", sends=sends)
        for address in ("127.0.0.2", "127.0.0.99"):
            assert await ask(*await connect(address), f"{GET}\n") == (200, "GET /livez\n")


async def test_a_scraper_keeps_its_connection_through_a_flood_from_elsewhere() -> None:
    async with serving() as connect:
        scraper = await connect("127.0.0.9")
        assert (await ask(*scraper, f"{GET}\n"))[0] == 200
        for number in range(3 * server.MAX_CONNECTIONS):
            await connect(f"127.0.0.{20 + number % 4}")
        assert (await ask(*scraper, f"{GET}\n"))[0] == 200


async def test_of_one_address_the_connection_that_waited_longest_goes() -> None:
    async with serving() as connect:
        first, second = await connect(), await connect()
        assert (await ask(*first, f"{GET}\n"))[0] == 200
        for _ in range(server.MAX_CONNECTIONS_PER_ADDRESS - 1):
            await connect()
        async with asyncio.timeout(HANG_SECONDS):
            assert await second[0].read() == b""
        assert (await ask(*first, f"{GET}\n"))[0] == 200


async def test_requests_that_come_together_keep_nobody_else_waiting() -> None:
    async with serving() as connect:
        many, _ = await connect(sends="GET /page HTTP/1.1\nHost: a\n\n" * 300)
        assert await ask(*await connect(), f"{GET}\n") == (200, "GET /livez\n")
        begun = await many.read(2**20)
        assert 0 < begun.count(b"200 OK") < 300


async def test_who_floods_does_not_displace_a_page_that_is_being_made() -> None:
    asked, gate = asyncio.Event(), asyncio.Event()

    async def slow(request: HttpRequest) -> Response:
        if request.path == "/metrics":
            asked.set()
            await gate.wait()
        return await echo(request)

    async with serving(slow) as connect:
        scraper = await connect(sends="GET /metrics HTTP/1.1\nHost: a\n\n")
        await asked.wait()
        for _ in range(2 * server.MAX_CONNECTIONS_PER_ADDRESS):
            await connect()
        # All of them were accepted before this one is answered.
        assert (await ask(*await connect(), f"{GET}\n"))[0] == 200
        gate.set()
        async with asyncio.timeout(HANG_SECONDS):
            assert (await scraper[0].readline()).startswith(b"HTTP/1.1 200")


async def test_pages_beyond_those_that_can_be_made_at_once_are_for_later() -> None:
    async with serving() as connect:
        for number in range(server.MAX_PAGES):
            await connect(f"127.0.0.{2 + number}", sends=STUCK)
        assert (await ask(*await connect(), "GET /page HTTP/1.1\nHost: a\n\n"))[0] == 503
        assert (await ask(*await connect(), f"{GET}\n"))[0] == 200


async def test_who_does_not_take_a_large_answer_gives_way_to_who_does() -> None:
    count = 2 * server.MAX_ANSWERS
    async with serving() as connect, asyncio.timeout(HANG_SECONDS):
        waiting = []
        for number in range(count):
            reader, _ = await connect(f"127.0.0.{2 + number}", sends=UNREAD)
            assert await reader.readexactly(5) == b"HTTP/"
            waiting.append(reader)
        reader, _ = await connect("127.0.0.99", sends=UNREAD)
        assert await takes_all(reader)
        # The newcomer was one of them, and the bound is what is held in memory for all of them.
        left = [await takes_all(reader) for reader in waiting]

    max_answers = server.MAX_ANSWERS - 1
    assert left == [False] * (count - max_answers) + [True] * max_answers


async def takes_all(reader: asyncio.StreamReader) -> bool:
    """Read a large answer; return whether it came to its end."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        return await reader.readexactly(len(LARGE)) == LARGE
    except (asyncio.IncompleteReadError, ConnectionError):
        return False


def test_the_agents_pages_need_no_web_framework() -> None:
    check = "import sys, gpuledger_agent.command; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
