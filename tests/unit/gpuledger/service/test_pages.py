"""The pages' HTTP: what scrapers and probes send is answered, anything else is refused."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gpuledger.service.pages import BadRequestError, Request, Response, parse_request, serve_pages


async def echo(request: Request) -> Response:
    if request.path == "/bad":
        raise ValueError(request.path)
    return Response(body=f"{request.method} {request.path}\n".encode())


@asynccontextmanager
async def talking() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with serve_pages(echo, host="127.0.0.1", port=0, context=None) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: str
) -> tuple[int, str]:
    """Send a request; gives status and body, which HEAD has none of."""
    writer.write(request.replace("\n", "\r\n").encode())
    async with asyncio.timeout(5):
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
        assert await ask(reader, writer, "HEAD /livez HTTP/1.1\n\n") == (200, "")
        assert await ask(reader, writer, "GET /livez HTTP/1.1\n\n") == (200, "GET /livez\n")


async def test_a_page_that_fails_costs_neither_the_connection_nor_the_others() -> None:
    async with talking() as (reader, writer):
        assert (await ask(reader, writer, "GET /bad HTTP/1.1\n\n"))[0] == 500
        assert (await ask(reader, writer, "GET /livez HTTP/1.1\n\n"))[0] == 200


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        ("nonsense\n\n", 400),
        ("GET http://other/ HTTP/1.1\n\n", 400),
        ("GET / HTTP/1.1\nbad header\n\n", 400),
        ("GET / HTTP/1.1\nname : space\n\n", 400),
        ("POST / HTTP/1.1\n\n", 405),
        ("GET / HTTP/1.1\nContent-Length: 5\n\n", 413),
        ("GET / HTTP/1.1\nTransfer-Encoding: chunked\n\n", 413),
        ("GET / HTTP/1.1\nX: " + "x" * 20_000 + "\n\n", 431),
        ("GET / HTTP/2\n\n", 505),
    ],
)
async def test_what_no_scraper_sends_is_refused_and_the_connection_ended(
    request_head: str, status: int
) -> None:
    async with talking() as (reader, writer):
        assert (await ask(reader, writer, request_head))[0] == status
        async with asyncio.timeout(5):
            assert await reader.read() == b""


@pytest.mark.parametrize(
    ("version", "connection", "stays"),
    [
        ("HTTP/1.1", "", True),
        ("HTTP/1.1", "Connection: close\r\n", False),
        ("HTTP/1.0", "", False),
        ("HTTP/1.0", "Connection: Keep-Alive\r\n", True),
    ],
)
def test_a_connection_stays_as_the_client_wishes(
    version: str,
    connection: str,
    stays: bool,  # noqa: FBT001  # a column of the table
) -> None:
    head = f"GET / {version}\r\n{connection}\r\n".encode()
    assert parse_request(head, certificate={})[1] is stays


def test_of_two_headers_of_one_name_the_first_counts() -> None:
    request, _ = parse_request(b"GET / HTTP/1.1\r\nA: 1\r\na: 2\r\n\r\n", certificate={})
    assert request.headers == {"a": "1"}


def test_a_request_needs_a_method_a_page_and_a_version() -> None:
    with pytest.raises(BadRequestError, match="Bad Request"):
        parse_request(b"GET /\r\n\r\n", certificate={})


async def test_an_open_connection_does_not_hold_up_the_end() -> None:
    async with asyncio.timeout(2):
        async with talking() as (reader, writer):
            await ask(reader, writer, "GET / HTTP/1.1\n\n")
    gc.collect()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_an_open_connection_is_ended_without_an_error_in_the_log() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    async with talking() as (reader, writer):
        await ask(reader, writer, "GET /livez HTTP/1.1\n\n")
    for _ in range(3):
        await asyncio.sleep(0)

    assert complaints == []


def test_the_agents_pages_need_no_web_framework() -> None:
    check = "import sys, agent.command; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
