"""OAUTHBEARER tokens: when they are fetched, how long they are valid and which logins use them."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import SaslAuthenticationFailed

from gpuledger.bus.kafka_tokens import Login, TokenFile, TokenProvider, TokenUnavailableError
from gpuledger.errors import UnavailableError
from gpuledger.runtime import Check
from gpuledger.runtime.retry import Backoff
from gpuledger.runtime.tokens import BearerToken
from tests.errors import has_words
from tests.fakes.seconds import Seconds
from tests.fakes.token_issuer import in_base64


def jwt(claims: object) -> str:
    return ".".join(in_base64(json.dumps(part).encode()) for part in ({"alg": "none"}, claims, ""))


async def test_a_token_file_is_due_if_it_has_another_token_or_the_current_one_has_expired() -> None:
    content = [jwt({"exp": 130})]
    file = TokenFile(lambda: content[0], time_seconds=lambda: 100.0)
    token = await file.fetch()
    assert not file.is_due(token, now_seconds=129.0)
    assert file.is_due(token, now_seconds=130.0)
    content[0] = "another"
    assert file.is_due(token, now_seconds=100.0)
    content[0] = "two words"
    with pytest.raises(UnavailableError, check=has_words("kafka.oauth.token_file")):
        await file.fetch()


@pytest.mark.parametrize(
    ("text", "session_seconds", "passed_seconds", "is_due"),
    [
        ("new", math.inf, 10.0, True),
        ("new", math.inf, 1.0, False),  # brokers refuse a second login within a second
        ("old", math.inf, 1e9, False),
        ("old", 60.0, 40.0, False),
        ("old", 60.0, 49.0, True),
    ],
)
def test_a_connection_logs_in_again_with_a_new_token_or_before_its_session_ends(
    text: str, session_seconds: float, passed_seconds: float, *, is_due: bool
) -> None:
    old, token = (BearerToken(text=each, begin_seconds=0.0) for each in ("old", text))
    login = Login(token=old, begin_seconds=5.0, session_seconds=session_seconds)
    assert login.is_due(token, now_seconds=5.0 + passed_seconds) == is_due


class Source:
    """Returns the token that the test has set, and counts the fetches."""

    def __init__(self, clock: Seconds) -> None:
        self._clock = clock
        self.text: str | None = "first"
        self.for_seconds = 100.0
        self.due = False
        self.fetched = 0

    async def fetch(self) -> BearerToken:
        self.fetched += 1
        await asyncio.sleep(0)
        if self.text is None:
            raise UnavailableError("the endpoint is unavailable")
        now = self._clock()
        return BearerToken.parse(self.text, now_seconds=now, for_seconds=self.for_seconds)

    def is_due(self, token: BearerToken, *, now_seconds: float) -> bool:
        return self.due or now_seconds >= token.end_seconds


class Parts:
    """A provider with its source, clock and check."""

    def __init__(self) -> None:
        self.clock, self.check = Seconds(), Check()
        self.source = Source(self.clock)
        self.sent: list[str] = []
        self.provider = TokenProvider(
            self.source,
            check=self.check,
            on_token=self.sent.append,
            time_seconds=self.clock,
            monotonic=self.clock,
            backoff=Backoff(first_seconds=1.0, max_seconds=60.0, jitter=lambda: 1.0),
        )


async def test_concurrent_callers_share_the_answer_to_one_request() -> None:
    parts = Parts()
    assert await asyncio.gather(*(parts.provider.token() for _ in range(5))) == ["first"] * 5
    assert await parts.provider.token() == "first"
    assert parts.source.fetched == 1
    assert parts.sent == ["first"]
    assert parts.check.is_ok


async def test_an_old_token_is_used_until_it_expires_while_failed_fetches_back_off() -> None:
    parts = Parts()
    await parts.provider.token()
    parts.source.text, parts.source.due = None, True
    requested = []
    for second in range(1, 100):
        parts.clock.advance(1.0)
        before = parts.source.fetched
        assert await parts.provider.token() == "first"
        assert "the endpoint is unavailable; a token until 1970" in parts.check.detail
        if parts.source.fetched > before:
            requested.append(second)
    assert requested == [1, 2, 4, 8, 16, 32, 64]
    parts.clock.advance(1.0)
    with pytest.raises(TokenUnavailableError):
        await parts.provider.token()
    parts.source.text, parts.source.due = "second", False
    parts.clock.advance(60.0)
    assert await parts.provider.token() == "second"
    assert parts.check.is_ok


class Connection:
    """Answers logins as a broker does."""

    def __init__(self, refused: set[str], session_ms: int = 0) -> None:
        self._refused, self._session_ms = refused, session_ms
        self.requests: list[Any] = []
        self.is_open = True

    async def send(self, request: Any) -> Any:  # noqa: ANN401  # aiokafka is untyped
        self.requests.append(request)
        written = str(vars(request))
        is_refused = any(f"Bearer {text}" in written for text in self._refused)
        message = b'{"status":"invalid_token"}' if is_refused else b""
        return SimpleNamespace(
            error_code=0, sasl_auth_bytes=message, session_lifetime_ms=self._session_ms
        )

    def connected(self) -> bool:
        return self.is_open


async def test_a_token_that_a_broker_rejects_is_fetched_again_and_never_without_a_pause() -> None:
    parts = Parts()
    connection: Any = Connection({"first"})
    for _ in range(50):
        with pytest.raises(SaslAuthenticationFailed, check=has_words("invalid_token")):
            await parts.provider.log_in(connection)
        assert "a broker rejected the token" in parts.check.detail
    assert parts.source.fetched == 1
    for _ in range(100):
        parts.clock.advance(1.0)
        with pytest.raises(SaslAuthenticationFailed):
            await parts.provider.log_in(connection)
    assert parts.source.fetched < 10
    parts.source.text = "second"
    parts.clock.advance(61.0)
    await parts.provider.log_in(connection)
    assert parts.check.is_ok
