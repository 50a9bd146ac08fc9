"""What comes over the network: requests for the pages, and what the API server tells of pods."""

import asyncio

import orjson
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw
from structlog.testing import capture_logs

from enricher.podwatch.api import KubernetesError
from enricher.podwatch.decode import PodReader
from enricher.podwatch.events import Deleted, Upserted, WatchReader
from gpuledger.codec import decoder_of, encode
from gpuledger.records import PodRecord
from gpuledger.runtime.http.exchange import HttpRequest, Response
from gpuledger.runtime.http.server import serve_pages
from tests.default_topics import PODS
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.unit.enricher.podwatch.builders import encoded, owned_by, pod

REQUESTS = [
    b"GET /metrics HTTP/1.1\r\nHost: a:9400\r\nAccept: text/plain\r\nAccept-Encoding: gzip\r\n\r\n",
    b"HEAD /readyz HTTP/1.0\r\nConnection: keep-alive\r\nAuthorization: Basic YTpi\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n" * 2,
]
GOOD = b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
OWNED = pod(metadata={"ownerReferences": [owned_by("Job", "j")], "labels": {"app": "a"}})
PODS_TOLD = [encoded(pod()), encoded(OWNED)]
LINES = [orjson.dumps({"type": kind, "object": OWNED}) for kind in ("ADDED", "DELETED")] + [
    b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"5"}}}',
    b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"m"}}',
]


async def page(_: HttpRequest) -> Response:
    return Response(body=b"ok")


async def ask(host: str, port: int, data: bytes) -> bytes:
    """Send bytes and the end of them; return what is answered until the other side has ended."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@given(data=st.lists(changed_bytes(REQUESTS), min_size=1, max_size=5))
def test_the_pages_answer_the_next_one_whatever_was_asked_before(data: list[bytes]) -> None:
    async def run() -> None:
        async with serve_pages(page, host="127.0.0.1", port=0, context=None) as (host, port):
            for one in data:
                found = await ask(host, port, one)
                assert found == b"" or found.startswith(b"HTTP/1.1 ")
                assert not found.startswith(b"HTTP/1.1 5") or found.startswith(b"HTTP/1.1 505 ")
            assert (await ask(host, port, GOOD)).startswith(b"HTTP/1.1 200 ")

    with capture_logs() as lines:
        asyncio.run(run())
    assert "page_failed" not in {line["event"] for line in lines}


def reader() -> PodReader:
    return PodReader(labels=["*"], annotations=["a/b"], gpu_resource_prefixes=["nvidia.com/"])


def check(record: PodRecord) -> None:
    """What podwatch publishes can be read."""
    decoder_of(PODS.name, PodRecord).decode(encode(record))


@given(line=changed_bytes(LINES) | changed_json(LINES))
def test_a_line_of_a_watch_is_read_or_passed_over_or_is_the_servers_error(line: bytes) -> None:
    try:
        found = WatchReader(reader(), kind="pod").read(line)
    except KubernetesError:
        return
    if isinstance(found, Upserted | Deleted):
        check(found.record)


@example(item=encoded(pod(status={"containerStatuses": [{"name": "m", "restartCount": 2**63}]})))
@given(item=changed_bytes(PODS_TOLD) | changed_json(PODS_TOLD))
def test_an_item_of_a_list_is_read_or_passed_over(item: bytes) -> None:
    found = WatchReader(reader(), kind="pod").item(Raw(item))
    if isinstance(found, Upserted):
        check(found.record)
