"""Whatever answers in the API server's place, podwatch has an error of its own to go on from."""

import aiohttp
import pytest

from enricher.podwatch.api import AnswerTooLargeError, KubernetesError, answered, limits, open_api
from enricher.podwatch.reflector import MAX_PAGE_BYTES
from enricher.podwatch.settings import KubernetesSettings
from tests.fakes.hostile_http import HUGE_PAGES, MIB, NO_HTTP, ODD_PAGES, Raw, answering, page

NESTED = b'{"metadata":' + b"[" * 50_000


async def read(answer: Raw) -> bytes:
    async with answering([answer]) as server, open_api(KubernetesSettings(url=server.url)) as api:
        asked = api.get("/api/v1/pods", query={}, idle_timeout_seconds=20.0, total_seconds=20.0)
        async with asked as found:
            return await found.read(max_bytes=MAX_PAGE_BYTES)


@pytest.mark.parametrize(
    "answer", [*ODD_PAGES.values(), *NO_HTTP.values(), *HUGE_PAGES.values(), page(NESTED)]
)
async def test_what_is_no_answer_of_an_api_server_is_an_error_of_ours(answer: Raw) -> None:
    with pytest.raises(KubernetesError) as caught:
        await read(answer)

    assert caught.value.status in (503, None)
    assert len(str(caught.value)) < 3000
    assert str(caught.value).encode()


async def test_of_an_answer_that_is_too_large_no_more_is_read_than_memory_is_set_aside_for() -> (
    None
):
    ok = b"HTTP/1.1 200 OK\r\n"
    endless = Raw(begin=ok + b"\r\n", again=b" " * MIB, times=10_000)
    with pytest.raises(AnswerTooLargeError, match=f"over {MAX_PAGE_BYTES} bytes"):
        await read(endless)


@pytest.mark.parametrize(("header", "seconds"), [(b"7", 7), (b"1e300", 600), (b"nan", 0)])
async def test_how_long_to_wait_is_bounded(header: bytes, seconds: float) -> None:
    with pytest.raises(KubernetesError) as caught:
        await read(page(b"", b"Retry-After: " + header))

    assert caught.value.retry_after_seconds == seconds


@pytest.mark.parametrize("body", [b"who is Bearer tok-hunter2?", b'{"message":"no tok-hunter2"}'])
async def test_a_refusal_does_not_show_the_token_that_was_sent(body: bytes) -> None:
    refusal = page(body, status=b"HTTP/1.1 401 Unauthorized\r\n")
    async with answering([refusal]) as server, aiohttp.ClientSession() as session:
        sent = session.get(server.url, headers={"Authorization": "Bearer tok-hunter2"})
        patience = limits(connect_seconds=5, idle_timeout_seconds=5, total_seconds=5)
        with pytest.raises(KubernetesError, match=r"answered 401: (who is|no) ") as caught:
            async with answered(sent, server=server.url, patience=patience):
                pass
    assert "hunter2" not in str(caught.value)
