"""Tokens that expire: when they do, and which one is in use."""

from __future__ import annotations

import json
import math

import pytest

from gpuledger.errors import UnavailableError
from gpuledger.runtime import Check
from gpuledger.runtime.retry import Backoff
from gpuledger.runtime.tokens import BearerToken, TokenInForce, spread_renewal
from tests.fakes.seconds import Seconds
from tests.fakes.token_issuer import in_base64


def jwt(claims: object) -> str:
    return ".".join(in_base64(json.dumps(part).encode()) for part in ({"alg": "none"}, claims, ""))


@pytest.mark.parametrize(
    ("text", "for_seconds", "end"),
    [
        ("opaque", math.inf, math.inf),
        ("opaque", 60.0, 160.0),
        (jwt({"exp": 130}), math.inf, 130.0),
        (jwt({"exp": 130}), 60.0, 130.0),
        (jwt({"exp": 230}), 60.0, 160.0),
        (jwt({"exp": "soon"}), math.inf, math.inf),
        (jwt({"exp": 1e300}), math.inf, math.inf),
        (jwt(["exp"]), math.inf, math.inf),
        ("a.%%%.c", math.inf, math.inf),
    ],
)
def test_a_token_expires_at_its_own_time_or_at_the_endpoints_whichever_is_earlier(
    text: str, for_seconds: float, end: float
) -> None:
    token = BearerToken.parse(text, now_seconds=100.0, for_seconds=for_seconds)
    assert (token.text, token.end_seconds) == (text, end)
    assert text not in repr(token)


@pytest.mark.parametrize("text", ["", "two words", "a\x01auth=b", "naïve", jwt({"exp": 99})])
def test_an_invalid_or_expired_token_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ValueError, match=r"expired on 1970|other invalid characters") as caught:
        BearerToken.parse(text, now_seconds=100.0)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(("chance", "at"), [(0.0, 175.0), (0.5, 180.0), (1.0, 185.0)])
def test_the_next_token_is_requested_before_the_current_one_expires(
    chance: float, at: float
) -> None:
    token = BearerToken(text="t", begin_seconds=100.0, end_seconds=200.0)
    assert spread_renewal(token, chance=lambda: chance) == pytest.approx(at)


class Source:
    """Returns another token each time, or the same, and counts."""

    def __init__(self, clock: Seconds) -> None:
        self._clock = clock
        self.gives_others = True
        self.fetched = 0

    async def fetch(self) -> BearerToken:
        self.fetched += 1
        text = f"token-{self.fetched}" if self.gives_others else "token"
        return BearerToken.parse(text, now_seconds=self._clock(), for_seconds=1e6)

    def is_due(self, token: BearerToken, *, now_seconds: float) -> bool:
        return False


class Parts:
    def __init__(self) -> None:
        self.clock, self.check = Seconds(), Check()
        self.source = Source(self.clock)
        self.tokens = TokenInForce(
            self.source,
            check=self.check,
            time_seconds=self.clock,
            monotonic=self.clock,
            backoff=Backoff(first_seconds=1.0, max_seconds=60.0, jitter=lambda: 1.0),
        )


async def test_a_token_that_was_accepted_and_is_then_rejected_is_replaced_at_once() -> None:
    parts = Parts()
    first = await parts.tokens.current()
    parts.tokens.confirm(first)
    parts.tokens.refuse(first, "the receiver refuses the token")
    assert "the receiver refuses the token; a token until" in parts.check.detail
    second = await parts.tokens.current()
    assert second.text != first.text
    assert not parts.check.is_ok, "the second one was not accepted yet"
    parts.tokens.confirm(second)
    assert parts.check.is_ok


async def test_a_rejection_of_an_older_token_does_not_cost_the_current_one() -> None:
    parts = Parts()
    first = await parts.tokens.current()
    parts.tokens.confirm(first)
    for _ in range(5):
        parts.tokens.refuse(first, "refused")
        await parts.tokens.current()
    assert parts.source.fetched == 2


@pytest.mark.parametrize("gives_others", [True, False])
@pytest.mark.parametrize("was_taken", [True, False])
async def test_tokens_that_are_all_rejected_are_requested_with_growing_pauses(
    *, gives_others: bool, was_taken: bool
) -> None:
    parts = Parts()
    parts.source.gives_others = gives_others
    first = await parts.tokens.current()
    if was_taken:
        parts.tokens.confirm(first)
    for _ in range(1000):
        parts.tokens.refuse(await parts.tokens.current(), "refused")
        parts.clock.advance(0.1)
    assert 4 <= parts.source.fetched <= 9


async def test_tokens_that_are_accepted_and_rejected_in_turn_are_not_replaced_each_time() -> None:
    parts = Parts()
    for _ in range(1000):
        token = await parts.tokens.current()
        parts.tokens.confirm(token)
        parts.tokens.refuse(token, "refused")
        parts.clock.advance(0.01)
    assert parts.source.fetched <= 13


async def test_an_expired_token_is_never_returned() -> None:
    parts = Parts()
    await parts.tokens.current()
    parts.clock.advance(1e6)
    with pytest.raises(UnavailableError):
        await parts.tokens.current()
