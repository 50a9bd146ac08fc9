"""Whatever answers in the API server's place, podwatch raises its own error and can continue."""

from contextlib import aclosing
from pathlib import Path

import pytest

from gpuledger_enricher.podwatch.api import AnswerTooLargeError, KubernetesError
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.events import WatchReader, split_lines
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from gpuledger_enricher.podwatch.reflector import MAX_PAGE_BYTES
from tests.errors import has_words
from tests.fakes.hostile_http import HUGE_PAGES, MIB, NO_HTTP, ODD_PAGES, Raw, answering, page
from tests.unit.enricher.podwatch.builders import reader_of, write_kubeconfig
from tests.unit.enricher.podwatch.misbehaving import refused

NESTED = b'{"metadata":' + b"[" * 50_000


async def read(answer: Raw) -> bytes:
    async with answering([answer]) as server, open_api(KubernetesSettings(url=server.url)) as api:
        requested = api.get("/api/v1/pods", query={}, idle_timeout_seconds=20.0, total_seconds=20.0)
        async with requested as found:
            return await found.read(max_bytes=MAX_PAGE_BYTES)


@pytest.mark.parametrize(
    "answer", [*ODD_PAGES.values(), *NO_HTTP.values(), *HUGE_PAGES.values(), page(NESTED)]
)
async def test_an_invalid_answer_is_an_error_of_ours(answer: Raw) -> None:
    with pytest.raises(KubernetesError) as caught:
        await read(answer)

    assert caught.value.status in (503, None)
    assert len(str(caught.value)) < 3000
    assert str(caught.value).encode()


async def test_an_answer_that_is_too_large_is_read_only_up_to_the_limit() -> None:
    ok = b"HTTP/1.1 200 OK\r\n"
    endless = Raw(begin=ok + b"\r\n", again=b" " * MIB, times=10_000)
    with pytest.raises(AnswerTooLargeError):
        await read(endless)


@pytest.mark.parametrize(("header", "seconds"), [(b"7", 7), (b"1e300", 600), (b"nan", 0)])
async def test_the_wait_that_a_server_requests_is_bounded(header: bytes, seconds: float) -> None:
    with pytest.raises(KubernetesError) as caught:
        await read(page(b"", b"Retry-After: " + header))

    assert caught.value.retry_after_seconds == seconds


TOKEN = "tok-hunter2-0123"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def expired(token: str) -> bytes:
    """Return a line of a watch that reports an expired token, as one chunk."""
    line = b'{"type":"ERROR","object":{"code":401,"message":"token %s expired"}}\n' % token.encode()
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(line), line)


async def follow(settings: KubernetesSettings) -> None:
    """Read one watch as podwatch does."""
    reader = WatchReader(reader_of(), kind="pod")
    async with (
        open_api(settings) as api,
        api.get("/api", query={}, idle_timeout_seconds=9.0, total_seconds=9.0) as answer,
        aclosing(split_lines(answer.chunks())) as lines,
    ):
        async for line in lines:
            reader.read(line)


QUOTES: dict[str, bytes] = {
    "the status line": f"HTTP/1.1 you sent {TOKEN}\r\n\r\n".encode(),
    "a header": OK + f"bad header Bearer {TOKEN}\r\n\r\n".encode(),
    "the size of a chunk": CHUNKED + f"Bearer {TOKEN}\r\n".encode(),
    "a line of a watch": CHUNKED + expired(TOKEN),
    "the target of a redirect": f"HTTP/1.1 302 to {TOKEN}\r\nLocation: ftp://h/{TOKEN}\r\n"
    "Content-Length: 0\r\n\r\n".encode(),
    "the reason": f"HTTP/1.1 403 no {TOKEN}\r\nContent-Length: 0\r\n\r\n".encode(),
}


@pytest.mark.parametrize("where", QUOTES)
@pytest.mark.parametrize("login", ["a token", "a user in the address"])
async def test_no_quoted_answer_shows_the_credentials_that_were_sent(
    where: str, login: str, tmp_path: Path
) -> None:
    async with answering([Raw(begin=QUOTES[where])]) as server:
        if login == "a token":
            file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token=TOKEN)
            settings = KubernetesSettings(kubeconfig=str(file))
        else:
            settings = KubernetesSettings(url=server.url.replace("//", f"//me:{TOKEN}@"))
        with pytest.raises(KubernetesError) as caught:
            await follow(settings)
    assert "hunter" not in str(caught.value)
    assert "hunter" not in caught.value.detail
    assert str(caught.value)


async def test_a_redirect_is_not_followed_without_credentials() -> None:
    moved = Raw(begin=b"HTTP/1.1 302 x\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n")
    async with answering([moved]) as server:
        with refused(302):
            await follow(KubernetesSettings(url=server.url))


async def test_a_redirect_takes_the_token_to_no_other_server(tmp_path: Path) -> None:
    async with answering([page(b"")]) as other:
        location = f"Location: {other.url}/\r\nContent-Length: 0\r\n\r\n".encode()
        async with answering([Raw(begin=b"HTTP/1.1 302 x\r\n" + location)]) as server:
            file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token=TOKEN)
            with refused(503):
                await follow(KubernetesSettings(kubeconfig=str(file)))
        assert TOKEN.encode() in server.heads[0]
        assert TOKEN.encode() not in other.heads[0]


@pytest.mark.parametrize("body", [b"who is Bearer tok-hunter2?", b'{"message":"no tok-hunter2"}'])
async def test_a_refusal_does_not_show_the_token_that_was_sent(body: bytes) -> None:
    refusal = page(body, status=b"HTTP/1.1 401 Unauthorized\r\n")
    async with answering([refusal]) as server:
        settings = KubernetesSettings(url=server.url.replace("//", "//me:tok-hunter2@"))
        with pytest.raises(KubernetesError, check=has_words("401")) as caught:
            await follow(settings)
    assert "hunter2" not in str(caught.value)
