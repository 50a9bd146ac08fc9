"""Requests are read strictly: what two programs could read in two ways is refused by this one."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.runtime.http.exchange import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    BadRequestError,
    Exchange,
    HttpRequest,
    Response,
)

OK = Response(body=b"ok\n")
GET = b"GET /livez HTTP/1.1\r\nHost: a\r\n"
HEADERS = b"".join(b"a%d: b\r\n" % number for number in range(MAX_HEADERS))


def read(*pieces: bytes) -> HttpRequest | None:
    exchange, found = Exchange(), None
    for piece in pieces:
        exchange.receive(piece)
        found = exchange.next_request(certificate={})
    return found


def refusal_of(*pieces: bytes) -> int | None:
    try:
        read(*pieces)
    except BadRequestError as error:
        return error.status
    return None


@pytest.mark.parametrize(
    ("head", "status"),
    [
        # What may be read in two ways.
        (GET + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n", 400),
        (GET + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n", 400),
        (GET + b"Content-Length: 0, 5\r\n\r\n", 400),
        (GET + b"Content-Length: +5\r\n\r\n", 400),
        (GET + b"Content-Length : 5\r\n\r\n", 400),
        (GET + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (GET + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
        (GET + b"Transfer-Encoding: xchunked\r\n\r\n", 501),
        (GET + b"X: a\r\n b\r\n\r\n", 400),
        (GET + b"X: a\r\n\tb\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400),
        (GET + b"X: a\nY: b\r\n\r\n", 400),
        (GET + b"X: a\rY: b\r\n\r\n", 400),
        (GET + b"X: a\0b\r\n\r\n", 400),
        (GET + b"Host: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"\r\n" + GET + b"\r\n", 400),
        (b"\n" + GET + b"\r\n", 400),
        # What is no request.
        (b"nonsense\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET http://other/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /caf\xe9 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (GET + b"bad header\r\n\r\n", 400),
        (GET + b"name : space\r\n\r\n", 400),
        (b"GET / HTTP/2\r\nHost: a\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS on a port without TLS
        # What no page takes.
        (b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (GET + b"Content-Length: 5\r\n\r\n", 413),
        (GET + b"Transfer-Encoding: chunked\r\n\r\n", 413),
        (GET + b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (GET + HEADERS + b"\r\n", 400),
    ],
)
def test_what_no_scraper_sends_is_refused_and_the_connection_ended(
    head: bytes, status: int
) -> None:
    for pieces in ([head], [head[at : at + 1] for at in range(len(head))]):
        assert refusal_of(*pieces) == status

    exchange = Exchange()
    with suppress(BadRequestError):
        exchange.receive(head)
        exchange.next_request(certificate={})
    assert b"\r\nConnection: close\r\n" in exchange.answer(OK)
    assert not exchange.stays()


def test_a_request_is_the_same_in_whatever_pieces_it_comes() -> None:
    head = b"GET /metrics?a=b HTTP/1.1\r\nHost: a\r\nA: 1\r\na: 2\r\nB: caf\xe9\r\n\r\n"
    whole = read(head)

    assert whole == read(*(head[at : at + 1] for at in range(len(head))))
    assert whole == HttpRequest(
        method="GET",
        path="/metrics",
        headers={"host": "a", "a": "1", "b": "caf\xe9"},
        query="a=b",
    )


@pytest.mark.parametrize(
    ("head", "stays"),
    [
        (GET, True),
        (GET + b"Content-Length: 0\r\n", True),
        (GET + b"Upgrade: h2c\r\nConnection: Upgrade\r\n", True),
        (GET + b"Expect: 100-continue\r\n", True),
        (GET + b"Connection: close\r\n", False),
        (b"GET / HTTP/1.0\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n", False),
    ],
)
def test_a_connection_stays_as_the_client_wishes(head: bytes, *, stays: bool) -> None:
    exchange = Exchange()
    exchange.receive(head + b"\r\n")
    assert exchange.next_request(certificate={}) is not None
    assert exchange.answer(OK).startswith(b"HTTP/1.1 200 OK\r\n")
    assert exchange.stays() is stays


def test_requests_that_come_together_are_answered_one_after_the_other() -> None:
    exchange, answers = Exchange(), []
    exchange.receive(
        (GET + b"Content-Length: 0\r\n\r\n") * 2 + b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n"
    )
    while (request := exchange.next_request(certificate={})) is not None:
        answers.append((request.method, exchange.answer(OK)))
        assert exchange.stays()
    assert [method for method, _ in answers] == ["GET", "GET", "HEAD"]
    assert [answer.endswith(b"\r\n\r\nok\n") for _, answer in answers] == [True, True, False]
    assert b"Content-Length: 3\r\n" in answers[2][1]


@given(
    st.lists(
        st.binary(min_size=1, max_size=99)
        | st.sampled_from([GET, b"\r\n", b"\r\n\r\n", b" ", b":"])
    )
)
def test_whatever_comes_is_a_request_or_refused(pieces: list[bytes]) -> None:
    exchange = Exchange()
    try:
        for piece in pieces:
            exchange.receive(piece)
            if exchange.next_request(certificate={}) is not None:
                exchange.answer(OK)
                if not exchange.stays():
                    return
    except BadRequestError:
        assert b"Connection: close" in exchange.answer(OK)
