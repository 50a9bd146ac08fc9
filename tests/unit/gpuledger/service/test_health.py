"""The health pages tell what they are asked, over real HTTP on the loopback address."""

import socket
from functools import partial

import aiohttp
import orjson
import pytest
from prometheus_client import Counter

from gpuledger.errors import UserError
from gpuledger.service import Readiness, serve_health

COUNTER = Counter("gpuledger_test_pages", "Counted by a test of the health pages.")


async def get(address: str, page: str, **headers: str) -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}{page}", headers=headers) as response,
    ):
        return response.status, response.content_type, await response.text()


async def test_livez_says_ok_whatever_the_checks_say() -> None:
    readiness = Readiness()
    readiness.check("kafka").failed("gone")

    async with serve_health(listen="127.0.0.1:0", readiness=readiness) as address:
        assert await get(address, "/livez") == (200, "text/plain", "ok\n")


async def test_readyz_follows_the_checks() -> None:
    readiness = Readiness()
    check = readiness.check("kafka")

    async with serve_health(listen="127.0.0.1:0", readiness=readiness) as address:
        for change, expected_status in ((partial(check.failed, "gone"), 503), (check.ok, 200)):
            change()
            status, content_type, body = await get(address, "/readyz")
            assert (status, content_type) == (expected_status, "application/json")
            assert orjson.loads(body) == readiness.report()


@pytest.mark.parametrize(
    ("accept", "kind"),
    [("*/*", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")],
)
async def test_metrics_are_those_of_the_process_in_the_form_asked_for(
    accept: str, kind: str
) -> None:
    COUNTER.inc()

    async with serve_health(listen="127.0.0.1:0", readiness=Readiness()) as address:
        status, content_type, body = await get(address, "/metrics", Accept=accept)

    assert (status, content_type) == (200, kind)
    assert "gpuledger_test_pages_total" in body


async def test_leaving_the_context_closes_the_port() -> None:
    async with serve_health(listen="127.0.0.1:0", readiness=Readiness()) as address:
        pass

    with pytest.raises(aiohttp.ClientConnectorError):
        await get(address, "/livez")


async def test_an_address_in_use_is_the_users_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"http.listen: cannot listen on {listen}: .*in use"):
            async with serve_health(listen=listen, readiness=Readiness()):
                pass  # never reached
