"""Tokens that expire: the current token, and when to fetch the next one.

`TokenSource` is the interface to a source of tokens: a file that another program renews, or an
endpoint (`gpuledger.runtime.http.token_endpoint`). A token is replaced before it expires. If no new
token is available, the old one is used until it expires, and a check shows the failure. After that,
callers receive the reason as an error, and the source is queried again with growing waits.
"""

import asyncio
import base64
import json
import math
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Generic, Protocol, TypeVar

from gpuledger.errors import SettingsError, UnavailableError
from gpuledger.runtime.readiness import Check
from gpuledger.runtime.retry import Backoff

SAFE_RATIO: Final = 0.8
"""Part of the lifetime of a token or session after which it is renewed, as in Kafka's clients."""
_SPREAD_RATIO: Final = 0.05
"""Random deviation from `SAFE_RATIO`, so that not all nodes request new tokens at once."""
_RENEWAL_SECONDS: Final = 10.0
"""Minimum interval between immediate replacements, for example if one of two servers rejects
every token."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_PARTS_OF_JWT: Final = 3


@dataclass(frozen=True, kw_only=True)
class BearerToken:
    """A token and its expiry time."""

    text: str = field(repr=False)
    """The token itself."""
    begin_seconds: float
    """Unix time at which the token was obtained."""
    end_seconds: float = math.inf
    """Unix time at which the token expires; infinite if unknown."""

    @classmethod
    def parse(
        cls, text: str, *, now_seconds: float, for_seconds: float = math.inf
    ) -> "BearerToken":
        """Return a token that expires after `for_seconds`, or at a JWT's `exp` if that is earlier.

        `for_seconds` is the lifetime that its source reported. Raises `ValueError` if the token is
        malformed or expired; the message contains no part of the token.
        """
        if not _TOKEN.fullmatch(text):
            raise ValueError("it contains spaces or other invalid characters")
        end_seconds = min(now_seconds + for_seconds, _end_of_jwt(text))
        if end_seconds <= now_seconds:
            ended = datetime.fromtimestamp(max(0.0, end_seconds), tz=UTC)
            raise ValueError(
                f"it expired on {ended:%Y-%m-%d %H:%M:%S} UTC, by this machine's clock"
            )
        return cls(text=text, begin_seconds=now_seconds, end_seconds=end_seconds)


def _end_of_jwt(text: str) -> float:
    """Return the expiry time in a JWT, infinite for other tokens.

    The signature is not verified; that is up to the token's receiver.
    """
    parts = text.split(".")
    if len(parts) == _PARTS_OF_JWT:
        with suppress(ValueError, RecursionError):
            claims = json.loads(base64.urlsafe_b64decode(f"{parts[1]}==="))
            end = claims.get("exp") if isinstance(claims, dict) else None
            if isinstance(end, int | float) and 0 <= end < _LAST_SECONDS:
                return float(end)
    return math.inf


_LAST_SECONDS: Final = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


class Expiring(Protocol):
    """A credential that expires."""

    @property
    def text(self) -> str:
        """Return the secret, which also identifies the credential."""
        ...

    @property
    def begin_seconds(self) -> float:
        """Return the Unix time at which the credential was obtained."""
        ...

    @property
    def end_seconds(self) -> float:
        """Return the Unix time at which the credential expires; infinite if unknown."""
        ...


E = TypeVar("E", bound=Expiring)


class TokenSource(Protocol[E]):
    """A source of tokens."""

    async def fetch(self) -> E:
        """Return a current token; raise `UnavailableError` or `SettingsError`."""
        ...

    def is_due(self, token: E, *, now_seconds: float) -> bool:
        """Return whether to call `fetch`: this token expires soon, or another one is available."""
        ...


class TokenInForce(Generic[E]):
    """Keeps the current token; fetches it from the source and replaces it in time."""

    def __init__(
        self,
        source: TokenSource[E],
        *,
        check: Check,
        on_token: Callable[[str], None] = lambda _text: None,
        time_seconds: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        """Take the source of tokens, and the check that fails if it provides none.

        `on_token` is called with each token's secret before it is sent anywhere.
        """
        self._source, self._check, self._on_token = source, check, on_token
        self._time_seconds, self._monotonic = time_seconds, monotonic
        # Not a `RetryingCaller`: no caller waits here; each login receives a token or an error.
        self._backoff = backoff or Backoff(first_seconds=1.0, max_seconds=60.0)
        self._retry_seconds = -math.inf
        self._token: E | None = None
        self._failure = ""
        self._is_refused, self._is_confirmed = False, False
        self._renewed_seconds = -math.inf
        self._fetching = asyncio.Lock()

    async def current(self) -> E:
        """Return the token to log in with; raise `UnavailableError` if there is none.

        If another call is already fetching a token, this call waits for that token.
        """
        async with self._fetching:
            if self._is_due() and self._monotonic() >= self._retry_seconds:
                await self._fetch()
            if self._token is None or self._token.end_seconds <= self._time_seconds():
                raise UnavailableError(self._failure)
            return self._token

    def refuse(self, token: E, message: str) -> None:
        """Record that a token was rejected, so that the next call of `current` fetches another one.

        The token may have been revoked, or its key replaced. A token that was accepted before is
        replaced immediately, at most every ten seconds. Other tokens are replaced after a pause.
        """
        if token is not self._token or self._is_refused:
            return
        self._is_refused = True
        self._fail(message)
        now_seconds = self._monotonic()
        if self._is_confirmed and now_seconds - self._renewed_seconds >= _RENEWAL_SECONDS:
            self._renewed_seconds, self._retry_seconds = now_seconds, -math.inf

    def confirm(self, token: E) -> None:
        """Record that a token was accepted."""
        if token is self._token and not self._is_refused:
            self._is_confirmed = True
            self._backoff.reset()
            self._check.ok(_describe_end(token))

    def _is_due(self) -> bool:
        if self._token is None or self._is_refused:
            return True
        return self._source.is_due(self._token, now_seconds=self._time_seconds())

    async def _fetch(self) -> None:
        try:
            token = await self._source.fetch()
        except (UnavailableError, SettingsError) as error:
            self._failure = str(error)
            self._fail(self._failure)
        else:
            if not self._is_refused:
                self._backoff.reset()
                self._check.ok(_describe_end(token))
            # The source returned the rejected token again: wait before the next request.
            elif self._token is not None and token.text == self._token.text:
                self._retry_seconds = self._monotonic() + self._backoff.next_seconds()
            self._on_token(token.text)
            self._token, self._is_refused, self._is_confirmed = token, False, False

    def _fail(self, message: str) -> None:
        self._retry_seconds = self._monotonic() + self._backoff.next_seconds()
        in_force = self._token
        has_one = in_force is not None and in_force.end_seconds > self._time_seconds()
        behind = f"; {_describe_end(in_force)} stays in force" if in_force and has_one else ""
        self._check.failed(f"{message}{behind}")


def _describe_end(token: Expiring) -> str:
    """Return a readable description of a token's expiry time."""
    if math.isinf(token.end_seconds):
        return "a token without a known expiry time"
    end = datetime.fromtimestamp(token.end_seconds, tz=UTC)
    return f"a token until {end:%Y-%m-%d %H:%M:%S} UTC"


def spread_renewal(token: Expiring, *, chance: Callable[[], float] = random.random) -> float:
    """Return the Unix time, with a random deviation, at which to fetch the next token."""
    ratio = SAFE_RATIO + _SPREAD_RATIO * (2 * chance() - 1)
    return token.begin_seconds + ratio * (token.end_seconds - token.begin_seconds)
