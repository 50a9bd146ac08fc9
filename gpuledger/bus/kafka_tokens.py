"""The token of a login by OAUTHBEARER: until when it is valid, and who is logged in with it.

Where tokens come from is behind one seam, `TokenSource`: a file that something else renews
(`TokenFile`), or a token endpoint (`gpuledger.bus.token_endpoint`). A new token is put in force
before the old one ends, and each living connection logs in again with it: brokers close one whose
session has ended. They learn of it in the midst of other requests, so nothing has to be stopped.

While no new token is to be had the old one counts to its end, which a check shows; after that each
login fails with the reason, and the source is asked again with growing waits.
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
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaError, SaslAuthenticationFailed
from typing_extensions import override

from gpuledger.bus.kafka_internals import log_in_by_token
from gpuledger.errors import SettingsError, UnavailableError
from gpuledger.runtime import Check
from gpuledger.runtime.retry import Backoff

_LOOK_SECONDS: Final = 0.5
_SAFE_RATIO: Final = 0.8
"""After so much of its time a token, or a session, is renewed, as Kafka's own clients do."""
_SPREAD_RATIO: Final = 0.05
"""By so much more or less, so that the nodes of a fleet do not ask all at once."""
_MIN_LOGIN_SECONDS: Final = 1.5
"""How long a login must have stood: brokers refuse a second one within a second."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_PARTS_OF_JWT: Final = 3


class TokenUnavailableError(KafkaError):  # type: ignore[misc]  # aiokafka publishes no types
    """There is no token to log in with: for the client a connection that failed."""


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

    def describe_end(self) -> str:
        """Return until when it is valid, for people."""
        if math.isinf(self.end_seconds):
            return "a token without a known end"
        end = datetime.fromtimestamp(self.end_seconds, tz=UTC)
        return f"a token until {end:%Y-%m-%d %H:%M:%S} UTC"


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


class TokenSource(Protocol):
    """Where tokens come from."""

    async def fetch(self) -> BearerToken:
        """Return a token of now; raises `UnavailableError` or `SettingsError`."""
        ...

    def is_due(self, token: BearerToken, *, now_seconds: float) -> bool:
        """Return whether another token than the one fetched last is to be had, or needed."""
        ...


class TokenFile:
    """A token that something else keeps in a file, and renews there before it ends."""

    def __init__(
        self, read: Callable[[], str], *, time_seconds: Callable[[], float] = time.time
    ) -> None:
        """Take what returns the file's content as of now."""
        self._read, self._time_seconds = read, time_seconds

    async def fetch(self) -> BearerToken:
        """Return the token that is there now; raises `UnavailableError` where it is of no use."""
        try:
            return BearerToken.parse(self._read(), now_seconds=self._time_seconds())
        except ValueError as error:
            raise UnavailableError(
                f"kafka.oauth.token_file: the token cannot be used: {error}; put a new one there"
            ) from error

    def is_due(self, token: BearerToken, *, now_seconds: float) -> bool:
        """Return whether the file has another one, or this one has ended."""
        return now_seconds >= token.end_seconds or self._read() != token.text


@dataclass(frozen=True, kw_only=True)
class Login:
    """With what a connection logged in, and for how long."""

    token: BearerToken
    begin_seconds: float
    """Monotonic time."""
    session_seconds: float
    """How long the broker keeps the connection with it; infinite where it does not say."""

    def is_due(self, token: BearerToken, *, now_seconds: float) -> bool:
        """Return whether the connection is to log in again with the token, at that monotonic time.

        With another one than it has; with the same one where the session ends before the token,
        as the brokers' `connections.max.reauth.ms` has it.
        """
        passed_seconds = now_seconds - self.begin_seconds
        if passed_seconds < _MIN_LOGIN_SECONDS:
            return False
        return token.text != self.token.text or passed_seconds > _SAFE_RATIO * self.session_seconds


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc]  # as above
    """Has the token in force, and the connections that are logged in."""

    def __init__(
        self,
        source: TokenSource,
        *,
        check: Check,
        on_token: Callable[[str], None] = lambda _text: None,
        time_seconds: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        """Take where tokens come from, and the check that fails where none does.

        `on_token` is called with each token before it is sent anywhere.
        """
        self._source, self._check, self._on_token = source, check, on_token
        self._time_seconds, self._monotonic = time_seconds, monotonic
        # Not a `RetryingCaller`: nobody waits here, each login asks and is told what there is.
        self._backoff = backoff or Backoff(first_seconds=1.0, max_seconds=60.0)
        self._retry_seconds = -math.inf
        self._token: BearerToken | None = None
        self._failure = ""
        self._is_refused = False
        self._fetching = asyncio.Lock()
        self._logins: WeakKeyDictionary[AIOKafkaConnection, Login] = WeakKeyDictionary()
        self._timer: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None

    @override
    async def token(self) -> str:
        """Return the token to log in with now; raises `TokenUnavailableError`."""
        return (await self.in_force()).text

    async def in_force(self) -> BearerToken:
        """Return the token to log in with now; raises `TokenUnavailableError`.

        Whoever comes while another one asks waits for that answer.
        """
        async with self._fetching:
            if self._is_due() and self._monotonic() >= self._retry_seconds:
                await self._fetch()
            if self._token is None or self._token.end_seconds <= self._time_seconds():
                raise TokenUnavailableError(self._failure)
            return self._token

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
            # One that was refused and comes again is no reason to ask without a pause.
            is_other = self._token is None or token.text != self._token.text
            if is_other or not self._is_refused:
                self._backoff.reset()
                self._check.ok(token.describe_end())
            else:
                self._retry_seconds = self._monotonic() + self._backoff.next_seconds()
            self._on_token(token.text)
            self._token, self._is_refused = token, False

    def _fail(self, said: str) -> None:
        self._retry_seconds = self._monotonic() + self._backoff.next_seconds()
        in_force = self._token
        has_one = in_force is not None and in_force.end_seconds > self._time_seconds()
        behind = f"; {in_force.describe_end()} stays in force" if in_force and has_one else ""
        self._check.failed(f"{said}{behind}")

    async def log_in(self, connection: AIOKafkaConnection) -> None:
        """Log a new connection in; raises `TokenUnavailableError`, and aiokafka's errors."""
        await self._log_in(connection, await self.in_force(), is_again=False)

    async def _log_in(
        self, connection: AIOKafkaConnection, token: BearerToken, *, is_again: bool
    ) -> None:
        begin_seconds = self._monotonic()
        try:
            session_seconds = await log_in_by_token(connection, token.text, is_again=is_again)
        except SaslAuthenticationFailed as error:
            # It may be revoked, or its key was exchanged: what was fetched once is not kept then.
            if token is self._token and not self._is_refused:
                self._is_refused = True
                self._fail(f"a broker refuses the token: {error}")
            raise
        # A session that ends with its token is not longer by logging in with the same one.
        rest_seconds = token.end_seconds - self._time_seconds()
        if session_seconds > rest_seconds - _MIN_LOGIN_SECONDS:
            session_seconds = math.inf
        self._logins[connection] = Login(
            token=token, begin_seconds=begin_seconds, session_seconds=session_seconds
        )
        if not self._is_refused:
            self._check.ok(token.describe_end())
        if self._timer is None:
            self._look_later()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Have what is due renewed; end with the last connection, as nobody needs a token then."""
        self._timer = None
        if not self._living():
            return
        self._look_later()
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    def _living(self) -> list[tuple[AIOKafkaConnection, Login]]:
        return [item for item in self._logins.items() if item[0].connected()]

    async def _renew(self) -> None:
        """Fetch a token where one is due, and log in again whatever has an older one."""
        try:
            token = await self.in_force()
        except TokenUnavailableError:
            return  # the check says why, and so does each login that fails
        now_seconds = self._monotonic()
        due = [
            connection
            for connection, login in self._living()
            if login.is_due(token, now_seconds=now_seconds)
        ]
        await asyncio.gather(*(self._log_in_again(connection, token) for connection in due))

    async def _log_in_again(self, connection: AIOKafkaConnection, token: BearerToken) -> None:
        try:
            await self._log_in(connection, token, is_again=True)
        except TimeoutError:
            # A broker answers one request after another, and some wait for half a minute. It
            # closes by itself what has no session any more.
            self._logins.pop(connection, None)
        except (KafkaError, OSError):
            # What waits on it is told of a lost connection, and is sent again over a new one.
            connection.close()


def spread_renewal(token: BearerToken, *, chance: Callable[[], float] = random.random) -> float:
    """Return when to ask for the next token, Unix time: before this one ends, spread by chance."""
    ratio = _SAFE_RATIO + _SPREAD_RATIO * (2 * chance() - 1)
    return token.begin_seconds + ratio * (token.end_seconds - token.begin_seconds)
