"""Any response is read within bounds, and its status decides the outcome."""

import asyncio
import base64
import gzip
import html
import json
import re
import resource
import zlib
from collections.abc import Callable
from typing import cast
from urllib.parse import quote, quote_plus

import aiohttp
import pytest

from gpuledger.runtime.http.client import (
    MAX_BODY_BYTES,
    HttpAnswer,
    NoAnswerError,
    open_http,
    read_begin,
)
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.settings.secret import MASK
from gpuledger.texts import MAX_CHARACTERS, readable
from tests.fakes.hostile_http import HUGE_PAGES, MIB, NO_HTTP, ODD_PAGES, Raw, answering, page
from tests.hanging import HANG_SECONDS


async def ask(answer: Raw, *, timeout_seconds: float = 20.0) -> HttpAnswer:
    async with (
        answering([answer]) as server,
        open_http(headers={}, timeout_seconds=timeout_seconds) as http,
    ):
        return await http.post(server.url, data=b"x")


@pytest.mark.parametrize("what", ODD_PAGES)
async def test_the_status_is_returned_whatever_else_is_wrong(what: str) -> None:
    answer = await ask(ODD_PAGES[what])

    assert answer.status == 503
    assert answer.retry_after_seconds == 0
    assert answer.text.encode().decode() == answer.text
    assert "\x1b" not in answer.text


@pytest.mark.parametrize("what", HUGE_PAGES)
async def test_no_more_of_a_huge_page_is_read_than_is_shown(what: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = await ask(HUGE_PAGES[what])
    growth_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

    assert answer.status == 503
    assert len(answer.text) == MAX_CHARACTERS
    assert growth_bytes < 32 * MIB


@pytest.mark.parametrize("what", NO_HTTP)
async def test_a_reply_that_is_not_http_counts_as_no_answer(what: str) -> None:
    with pytest.raises(NoAnswerError, match=r"^http://127\.0\.0\.1:\d+: .") as caught:
        await ask(NO_HTTP[what])

    assert len(str(caught.value)) < MAX_CHARACTERS + 100
    assert str(caught.value).isprintable() or "\n" in str(caught.value)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        (b"gzip", gzip.compress(b"too old", mtime=0)),
        (b"Deflate", zlib.compress(b"too old")),
        (b"identity", b"too old"),
        (b"gzip", b"too old"),
        (b"br", b"too old"),
    ],
)
async def test_an_unrequested_content_encoding_is_decoded_if_possible(
    encoding: bytes, body: bytes
) -> None:
    assert (await ask(page(body, b"Content-Encoding: " + encoding))).text == "too old"


async def test_a_success_stays_a_success_whatever_its_body_is() -> None:
    ok = b"HTTP/1.1 200 OK\r\n"
    for answer in (
        page(b"junk", b"Content-Encoding: gzip", status=ok),
        Raw(begin=ok + b"Content-Length: 99\r\n\r\ncut"),
        Raw(begin=ok + b"\r\n", again=b"x" * MIB, times=300),
    ):
        found = await ask(answer)
        assert (found.is_success, found.text) == (True, "")


async def test_no_cookie_is_kept_because_each_response_could_set_another() -> None:
    first, second = (
        page(b"", b"Connection: close", b"Set-Cookie: %s=x" % name) for name in (b"a", b"b")
    )
    # Cookies are kept for host names, not for addresses.
    async with (
        answering([first, second]) as server,
        open_http(headers={}, timeout_seconds=20) as http,
    ):
        for _ in range(2):
            await http.post(server.url.replace("127.0.0.1", "localhost"), data=b"x")

    assert [b"cookie" in head for head in server.heads] == [False, False]


async def test_a_body_that_never_ends_is_cut_off_and_returned_in_part() -> None:
    class Dripping:
        def __init__(self) -> None:
            self.content, self._left = self, [b"too ", b"old"]

        async def readany(self) -> bytes:
            if not self._left:
                await asyncio.Event().wait()
            return self._left.pop(0)

    response = cast("aiohttp.ClientResponse", Dripping())
    async with asyncio.timeout(HANG_SECONDS):
        assert await read_begin(response, timeout_seconds=0) == b"too old"


async def test_secrets_in_the_address_are_in_no_error() -> None:
    async with (
        answering([NO_HTTP["another protocol"]]) as server,
        open_http(headers={}, timeout_seconds=5.0) as http,
    ):
        url = server.url.replace("//", "//me:hunter2@") + "/write?token=hunter3"
        with pytest.raises(NoAnswerError) as caught:
            await http.post(url, data=b"x")
    assert "hunter" not in str(caught.value)


SECRET = 'tok "hünt/er+2'
PLAIN = "tok-hunter-2"
BASIC = base64.b64encode(f"bob:{PLAIN}".encode()).decode()
SENT: dict[str, tuple[dict[str, str], str]] = {
    "a bearer token": ({"Authorization": f"Bearer {PLAIN}"}, ""),
    "a login": ({"Authorization": f"Basic {BASIC}"}, ""),
    "credentials in the address": ({}, f"bob:{PLAIN}"),
    "a header that the user set": ({"X-Api-Key": PLAIN}, ""),
}
"""Request headers, and the user of the address."""
QUOTED: dict[str, bytes] = {
    "as it was sent": PLAIN.encode(),
    "in base64": base64.b64encode(PLAIN.encode()),
    "as a header": BASIC.encode(),
    "broken off": b"broken off: tok-hunte",
}
"""How a server may quote the credentials."""


@pytest.mark.parametrize("quoted", QUOTED)
@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("status", [401, 500])
async def test_a_response_does_not_show_the_credentials_that_were_sent(
    sent: str, quoted: str, status: int
) -> None:
    headers, user = SENT[sent]
    message = b"invalid credentials: " + QUOTED[quoted]
    refusal = page(message, status=b"HTTP/1.1 %d No\r\n" % status)
    async with (
        answering([refusal]) as server,
        open_http(headers=headers, timeout_seconds=5.0) as http,
    ):
        url = server.url.replace("//", f"//{user}@") if user else server.url
        answer = await http.post(url, data=b"x")
    shown = "".join(one for one in answer.text if one.isprintable()).replace("\ufffd", "").lower()
    assert answer.text.startswith("invalid credentials: ")
    assert "hun" not in shown
    assert BASIC.lower() not in shown or "login" not in sent
    assert base64.b64encode(PLAIN.encode()).decode().lower() not in shown


async def test_the_error_for_a_reply_that_is_not_http_does_not_show_the_credentials() -> None:
    odd = Raw(begin=f"HTTP/1.1 401 No\r\nX\0: {PLAIN}\r\n{PLAIN}\r\n\r\n".encode())
    async with (
        answering([odd]) as server,
        open_http(headers={"Authorization": f"Bearer {PLAIN}"}, timeout_seconds=5.0) as http,
    ):
        with pytest.raises(NoAnswerError) as caught:
            await http.post(server.url, data=b"x")
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    "write",
    [
        str,
        quote,
        quote_plus,
        json.dumps,
        html.escape,
        lambda one: base64.b64encode(one.encode()).decode(),
        lambda one: base64.urlsafe_b64encode(one.encode()).decode().rstrip("="),
    ],
)
def test_a_credential_is_masked_in_every_form(write: Callable[[str], str]) -> None:
    for secret in (SECRET, SECRET * 30):
        url = f"http://a/write?token={quote(secret)}"
        masked = BasicCredentials.sent(url, {}).mask(f"no: {write(secret)} is wrong")
        assert masked.startswith("no: ")
        assert masked.endswith(" is wrong")
        assert MASK in masked
        assert len(masked) < 40


def test_text_around_or_between_credentials_does_not_reveal_them() -> None:
    """Letters that grow in lower case, a mask, and one credential within another."""
    sent = BasicCredentials.sent(
        f"http://bob:{quote(SECRET, safe='')}@a/?b={PLAIN}&c={PLAIN[:6]}", {}
    )
    masked = sent.mask(f"\u0130 {SECRET} {PLAIN}{PLAIN}{MASK}{PLAIN[:6]} {'x ' * 3}{PLAIN}")
    assert not re.search("t.k|h.n|er", masked)
    assert masked.startswith("\u0130 ")
    assert "x x x " in masked


def test_a_text_that_is_not_a_credential_is_kept() -> None:
    headers = {"Content-Type": "application/json", "X-Scope-OrgID": "tenant", "Authorization": ""}
    sent = BasicCredentials.sent("http://bob:hunter2@a/write?db=1", headers)
    message = "application/json of tenant 1 in db=1 is refused: bob, Bearer"
    assert sent.mask(message) == message
    assert BasicCredentials.sent("http://[", {}).mask(message) == message


async def test_a_server_that_never_finishes_its_response_times_out() -> None:
    drip = Raw(begin=b"HTTP/1.1 100 Continue\r\n\r\n", again=b"HTTP/1.1 100 Continue\r\n\r\n" * 99)
    with pytest.raises(NoAnswerError):
        await ask(Raw(begin=drip.begin, again=drip.again, times=10**9), timeout_seconds=0.2)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("  plain\n", "plain"),
        (b"caf\xe9", "caf\ufffd"),
        ("caf\u00e9", "caf\u00e9"),
        ("\udcff\x1b[0m", "?\ufffd[0m"),
        ("a\tb\nc", "a\tb\nc"),
        (b"\0" * MAX_BODY_BYTES, "\ufffd" * MAX_CHARACTERS),
        ("\U0001f600" * MAX_BODY_BYTES, "\U0001f600" * MAX_CHARACTERS),
    ],
)
def test_shown_text_can_be_written_anywhere(text: bytes | str, shown: str) -> None:
    assert readable(text) == shown
