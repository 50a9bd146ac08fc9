"""Scrapers and probes are answered, however many other clients there are and whatever they do."""

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress

import pytest

from gpuledger.runtime import Readiness
from gpuledger.runtime.http import server
from gpuledger.runtime.http.asgi import AsgiApp, Receive, Scope, Send, respond
from gpuledger.runtime.http.health_pages import HealthPages
from gpuledger.runtime.tasks import run_tasks
from tests.hanging import HANG_SECONDS

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LARGE = b"x" * 8 * 2**20


async def pages(scope: Scope, _: Receive, send: Send) -> None:
    if scope["path"] == "/bad":
        raise ValueError(scope["path"])
    if scope["path"] == "/stuck":
        await asyncio.Event().wait()
    await respond(send, LARGE if scope["path"] == "/large" else b"page\n")


@asynccontextmanager
async def serving(
    others: AsgiApp = pages,
) -> AsyncIterator[Callable[..., Awaitable[Connection]]]:
    """Serve pages; yield a function that connects to them from any loopback address."""
    app = HealthPages(Readiness(), others=others)
    async with (
        server.serve(app, host="127.0.0.1", port=0) as (host, port),
        AsyncExitStack() as stack,
    ):

        async def connect(*, sends: str = "") -> Connection:
            reader, writer = await asyncio.open_connection(host, port)
            stack.callback(writer.close)
            writer.write(sends.encode())
            return reader, writer

        yield connect


def get(path: str, *lines: str, method: str = "GET") -> str:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", *lines, "", ""])


async def ask(connection: Connection, request: str) -> tuple[int, str]:
    """Send a request; return status and body, which a HEAD response does not have."""
    reader, writer = connection
    writer.write(request.encode())
    async with asyncio.timeout(HANG_SECONDS):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().partition("content-length: ")[2].split()[0])
        body = b"" if request.startswith("HEAD") else await reader.readexactly(size)
    return int(head.split()[1]), body.decode()


async def test_one_connection_serves_several_requests_in_turn() -> None:
    async with serving() as connect:
        connection = await connect()
        for method, path, answer in (
            ("GET", "/livez?x=1", (200, "ok\n")),
            ("HEAD", "/livez", (200, "")),
            ("GET", "/page", (200, "page\n")),
        ):
            assert await ask(connection, get(path, method=method)) == answer


async def test_a_page_that_fails_affects_only_its_own_response() -> None:
    async with serving() as connect:
        assert (await ask(await connect(), get("/bad")))[0] == 500
        assert (await ask(await connect(), get("/livez")))[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/", method="POST"), 405),
        (get("/livez", "Content-Length: 9"), 413),
        (get("/livez", "Transfer-Encoding: chunked"), 413),
        (get("/livez", "Content-Length: 1", "Content-Length: 2"), 400),
        ("GET /livez HTTP/1.1\r\nA: " + "b" * 20_000, 400),
        ("no HTTP\r\n\r\n", 400),
    ],
)
async def test_a_body_a_long_head_or_another_method_closes_the_connection(
    request_: str, status: int
) -> None:
    async with serving() as connect:
        reader, _ = await connect(sends=request_)
        async with asyncio.timeout(HANG_SECONDS):
            assert f" {status} ".encode() in await reader.readline()
            await reader.read()


HELD: dict[str, str] = {
    "nothing": "",
    "half a request": "GET /metrics HTT",
    "a response that is not read": get("/large"),
    "many responses that are not read": get("/large") * 10,
    "a page that takes long": get("/stuck"),
}
"""Requests that keep a connection open."""


@pytest.mark.parametrize("sends", HELD.values(), ids=HELD)
async def test_a_probe_is_answered_however_many_connections_are_open(sends: str) -> None:
    async with serving() as connect:
        for _ in range(4 * server.MAX_WAITING):
            await connect(sends=sends)
        assert await ask(await connect(), get("/livez")) == (200, "ok\n")


async def test_the_connection_that_waits_longest_for_its_client_is_closed_first() -> None:
    async with serving() as connect:
        first, second = await connect(), await connect()
        for connection in (first, second, first):
            assert (await ask(connection, get("/livez")))[0] == 200
        for _ in range(server.MAX_WAITING - 1):
            await connect()
        async with asyncio.timeout(HANG_SECONDS):
            assert await second[0].read() == b""
        assert (await ask(first, get("/livez")))[0] == 200


async def test_a_burst_of_requests_over_separate_connections_is_answered_completely() -> None:
    """All arrive while the process is busy, as those of a dashboard behind an ingress."""
    answered = 0
    async with serving() as connect:
        _, writer = await connect()
        address = writer.get_extra_info("peername")
        with ExitStack() as stack:
            clients = [stack.enter_context(socket.socket()) for _ in range(3 * server.MAX_WAITING)]
            for client in clients:
                # Blocking, so that the server accepts none of them before all have sent.
                client.connect(address)
                client.sendall(get("/livez").encode())
                client.setblocking(False)  # noqa: FBT003  # has no name
            for client in clients:
                async with asyncio.timeout(HANG_SECONDS):
                    found = await asyncio.get_running_loop().sock_recv(client, 4096)
                answered += found.startswith(b"HTTP/1.1 200")
    assert answered == len(clients)


async def test_a_flood_of_connections_does_not_end_a_page_that_is_being_made() -> None:
    requested, gate = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        requested.set()
        await gate.wait()
        await pages(scope, receive, send)

    async with serving(slow) as connect:
        scraper = await connect(sends=get("/page"))
        await requested.wait()
        for _ in range(2 * server.MAX_WAITING):
            await connect()
        assert (await ask(await connect(), get("/livez")))[0] == 200
        gate.set()
        async with asyncio.timeout(HANG_SECONDS):
            assert (await scraper[0].readline()).startswith(b"HTTP/1.1 200")


async def test_pipelined_requests_do_not_delay_other_clients() -> None:
    async with serving() as connect:
        many, _ = await connect(sends=get("/page") * 300)
        assert await ask(await connect(), get("/livez")) == (200, "ok\n")
        begun = await many.read(2**20)
        assert 0 < begun.count(b"200 OK") < 300


@pytest.mark.parametrize("sends", ["", "GET /metrics HTT", get("/livez")])
async def test_a_client_that_does_not_finish_its_request_is_disconnected(
    sends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(server, "IDLE_SECONDS", 0)
    async with serving() as connect:
        reader, writer = await connect(sends=sends)

        async def trickle() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.001)

        async with asyncio.timeout(HANG_SECONDS), run_tasks(trickle()):
            with suppress(ConnectionError):
                await reader.read()


@pytest.mark.parametrize("sends", HELD.values(), ids=HELD)
async def test_an_open_connection_does_not_delay_shutdown(sends: str) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, reported: complaints.append(reported)
    )
    async with asyncio.timeout(HANG_SECONDS):
        async with serving() as connect:
            await connect(sends=sends)
            await ask(await connect(), get("/livez"))
    gc.collect()
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert complaints == []


def test_the_agents_pages_need_no_web_framework_and_no_command_line_library() -> None:
    heavy = "{'aiohttp', 'starlette', 'click', 'multiprocessing'}"
    check = f"import sys, gpuledger_agent.command; sys.exit(bool({heavy} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
