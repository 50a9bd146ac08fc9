"""Tokens that end: how long one is in force, and when the next one is asked for.

Where tokens come from is behind one seam, `TokenSource`: a file that something else renews, or an
endpoint (`gpuledger.runtime.http.token_endpoint`). A new token is put in force before the old one
ends. While no new one is to be had the old one counts to its end, which a check shows; after that
whoever asks is told the reason, and the source is asked again with growing waits.
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
"""After so much of its time a token, or a session, is renewed, as Kafka's own clients do."""
_SPREAD_RATIO: Final = 0.05
"""By so much more or less, so that the nodes of a fleet do not ask all at once."""
_RENEWAL_SECONDS: Final = 10.0
"""How often at most a token is replaced at once, as where one of two servers refuses each."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_PARTS_OF_JWT: Final = 3


@dataclass(frozen=True, kw_only=True)
class BearerToken:
    """A token, and until when it is valid."""

    text: str = field(repr=False)
    """The token itself."""
    begin_seconds: float
    """Since when it is known here, Unix time."""
    end_seconds: float = math.inf
    """When it expires, Unix time; infinite where nobody says so."""

    @classmethod
    def parse(
        cls, text: str, *, now_seconds: float, for_seconds: float = math.inf
    ) -> "BearerToken":
        """Return a token with the end that it says itself, where it is a JWT.

        `for_seconds` is how long it is valid by what was said of it. Raises `ValueError`, with
        nothing of the token in it, where it is none.
        """
        if not _TOKEN.fullmatch(text):
            raise ValueError("it has blanks or other characters in it that no token has")
        end_seconds = min(now_seconds + for_seconds, _end_of_jwt(text))
        if end_seconds <= now_seconds:
            ended = datetime.fromtimestamp(max(0.0, end_seconds), tz=UTC)
            raise ValueError(
                f"it expired on {ended:%Y-%m-%d %H:%M:%S} UTC, by this machine's clock"
            )
        return cls(text=text, begin_seconds=now_seconds, end_seconds=end_seconds)


def _end_of_jwt(text: str) -> float:
    """Return when a JWT expires, infinite for other tokens; verifying it is for the brokers."""
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
    """What is shown for a login, and ends."""

    @property
    def text(self) -> str:
        """The secret of it, by which one is told from another."""
        ...

    @property
    def begin_seconds(self) -> float:
        """Since when it is known here, Unix time."""
        ...

    @property
    def end_seconds(self) -> float:
        """When it expires, Unix time; infinite where nobody says so."""
        ...


E = TypeVar("E", bound=Expiring)


class TokenSource(Protocol[E]):
    """Where tokens come from."""

    async def fetch(self) -> E:
        """Return a token of now; raises `UnavailableError` or `SettingsError`."""
        ...

    def is_due(self, token: E, *, now_seconds: float) -> bool:
        """Return whether another token than the one fetched last is to be had, or needed."""
        ...


class TokenInForce(Generic[E]):
    """The token that counts now."""

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
        """Take where tokens come from, and the check that fails where none does.

        `on_token` is called with the secret of each token before it is sent anywhere.
        """
        self._source, self._check, self._on_token = source, check, on_token
        self._time_seconds, self._monotonic = time_seconds, monotonic
        # Not a `RetryingCaller`: nobody waits here, each login asks and is told what there is.
        self._backoff = backoff or Backoff(first_seconds=1.0, max_seconds=60.0)
        self._retry_seconds = -math.inf
        self._token: E | None = None
        self._failure = ""
        self._is_refused, self._is_confirmed = False, False
        self._renewed_seconds = -math.inf
        self._fetching = asyncio.Lock()

    async def current(self) -> E:
        """Return the token to log in with now; raises `UnavailableError` where there is none.

        Whoever comes while another one asks waits for that answer.
        """
        async with self._fetching:
            if self._is_due() and self._monotonic() >= self._retry_seconds:
                await self._fetch()
            if self._token is None or self._token.end_seconds <= self._time_seconds():
                raise UnavailableError(self._failure)
            return self._token

    def refuse(self, token: E, message: str) -> None:
        """Record that a token was refused: the next one who asks has another one fetched.

        It may be revoked, or its key was exchanged: what was fetched once is not kept then. One
        that was taken before is replaced at once, every ten seconds at most; others after a pause.
        """
        if token is not self._token or self._is_refused:
            return
        self._is_refused = True
        self._fail(message)
        now_seconds = self._monotonic()
        if self._is_confirmed and now_seconds - self._renewed_seconds >= _RENEWAL_SECONDS:
            self._renewed_seconds, self._retry_seconds = now_seconds, -math.inf

    def confirm(self, token: E) -> None:
        """Record that a token was taken."""
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
            # One that was refused and comes again is no reason to ask without a pause.
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
    """Return until when a token is valid, for people."""
    if math.isinf(token.end_seconds):
        return "a token without a known end"
    end = datetime.fromtimestamp(token.end_seconds, tz=UTC)
    return f"a token until {end:%Y-%m-%d %H:%M:%S} UTC"


def spread_renewal(token: Expiring, *, chance: Callable[[], float] = random.random) -> float:
    """Return when to ask for the next token, Unix time: before this one ends, spread by chance."""
    ratio = SAFE_RATIO + _SPREAD_RATIO * (2 * chance() - 1)
    return token.begin_seconds + ratio * (token.end_seconds - token.begin_seconds)
