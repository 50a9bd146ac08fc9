"""The health pages, over real HTTP on the loopback address."""

import gzip
import socket
from functools import partial

import aiohttp
import orjson
import pytest
from prometheus_client import Counter, Histogram

from gpuledger.errors import UserError
from gpuledger.runtime import Readiness, serve_health
from gpuledger.runtime.http.asgi import Receive, Scope, Send, respond
from tests.errors import has_words

COUNTER = Counter("gpuledger_test_pages", "Counted by a test of the health pages.")
HISTOGRAM = Histogram("gpuledger_test_seconds", "Observed by a test of the health pages.")


async def get(address: str, page: str, **headers: str) -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}{page}", headers=headers) as response,
    ):
        return response.status, response.content_type, await response.text()


async def test_livez_returns_ok_whatever_the_checks_report() -> None:
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


async def test_a_components_own_page_gets_path_and_query_as_they_were_sent() -> None:
    async def show(scope: Scope, _: Receive, send: Send) -> None:
        await respond(send, scope["path"].encode() + b" " + scope["query_string"])

    async with serve_health(listen="127.0.0.1:0", readiness=Readiness(), others=show) as address:
        assert await get(address, "/livez?own") == (200, "text/plain", "ok\n")
        for sent, seen in (("/own?a=1&b=2?3", "/own a=1&b=2?3"), ("/own", "/own ")):
            assert await get(address, sent) == (200, "text/plain", seen)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [("*/*", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")],
)
async def test_metrics_are_those_of_the_process_in_the_requested_format(
    accept: str, kind: str
) -> None:
    COUNTER.inc()

    async with serve_health(listen="127.0.0.1:0", readiness=Readiness()) as address:
        status, content_type, body = await get(address, "/metrics", Accept=accept)

    assert (status, content_type) == (200, kind)
    assert "gpuledger_test_pages_total" in body


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=x",
        "text/plain;version=\u00e9;escaping=nothing",
        "application/openmetrics-text;version=9999999999999999999999",
        ";;;===,,,",
        "",
    ],
)
async def test_an_invalid_accept_header_is_answered_in_one_of_our_formats(accept: str) -> None:
    async with serve_health(listen="127.0.0.1:0", readiness=Readiness()) as address:
        status, kind, _ = await get(address, "/metrics", Accept=accept)

    assert (status, kind) in [(200, "text/plain"), (200, "application/openmetrics-text")]


async def test_health_serves_the_probes_of_dcgm_exporters_chart() -> None:
    readiness = Readiness()
    readiness.check("kafka").failed("gone")

    async with serve_health(listen="127.0.0.1:0", readiness=readiness) as address:
        assert await get(address, "/health") == (200, "text/plain", "ok\n")


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text"])
async def test_no_metric_has_a_creation_time(accept: str) -> None:
    COUNTER.inc()
    HISTOGRAM.observe(1)

    async with serve_health(listen="127.0.0.1:0", readiness=Readiness()) as address:
        _, _, body = await get(address, "/metrics", Accept=accept)

    assert "gpuledger_test_seconds_count" in body
    assert "_created" not in body


async def fetch(address: str, accept_encoding: str) -> tuple[str | None, bytes]:
    """Return how the metrics are encoded, and their bytes as sent over the wire."""
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(
            f"http://{address}/metrics", headers={"Accept-Encoding": accept_encoding}
        ) as response,
    ):
        assert response.headers["Vary"] == "Accept-Encoding"
        return response.headers.get("Content-Encoding"), await response.read()


@pytest.mark.parametrize(
    ("accept_encoding", "is_compressed"),
    [
        ("gzip", True),
        ("gzip, deflate;q=0.5", True),
        ("deflate, GZIP;q=1.0", True),
        ("gzip; q=0.3", True),
        ("*", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("*, gzip;q=0", False),
        ("gzip;q=0.0", False),
        ("", False),
    ],
)
async def test_metrics_are_compressed_if_the_client_accepts_gzip(
    accept_encoding: str, *, is_compressed: bool
) -> None:
    async with serve_health(
        listen="127.0.0.1:0", readiness=Readiness(), page=lambda: b"gpuledger_page 1\n" * 1000
    ) as address:
        encoding, body = await fetch(address, accept_encoding)

    assert encoding == ("gzip" if is_compressed else None)
    text = gzip.decompress(body) if is_compressed else body
    assert b"gpuledger_page 1\n" in text
    assert (len(body) < len(text)) == is_compressed


async def test_leaving_the_context_closes_the_port() -> None:
    async with serve_health(listen="127.0.0.1:0", readiness=Readiness()) as address:
        pass

    with pytest.raises(aiohttp.ClientConnectorError):
        await get(address, "/livez")


async def test_an_address_in_use_is_a_user_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, check=has_words("http.listen", listen)):
            async with serve_health(listen=listen, readiness=Readiness()):
                pass  # never reached
