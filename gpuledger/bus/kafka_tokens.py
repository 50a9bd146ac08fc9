"""Tokens for OAUTHBEARER logins: a token file, and the token that each connection uses.

`gpuledger.runtime.tokens` decides which token is current. When it changes, each open connection
logs in again, because brokers close connections whose session has expired. The login is sent
between other requests, so none of them has to be stopped.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaError, SaslAuthenticationFailed
from typing_extensions import override

from gpuledger.bus.aiokafka_patches.logins import log_in_by_token
from gpuledger.errors import UnavailableError
from gpuledger.runtime import Check
from gpuledger.runtime.retry import Backoff
from gpuledger.runtime.tokens import SAFE_RATIO, BearerToken, TokenInForce, TokenSource

_CHECK_SECONDS: Final = 0.5
_MIN_LOGIN_SECONDS: Final = 1.5
"""Minimum age of a login before the next one: brokers reject a second one within a second."""


class TokenUnavailableError(KafkaError):  # type: ignore[misc]  # aiokafka publishes no types
    """No token is available for a login; aiokafka treats it as a failed connection."""


class TokenFile:
    """A token in a file that another program renews before the token expires."""

    def __init__(
        self, read: Callable[[], str], *, time_seconds: Callable[[], float] = time.time
    ) -> None:
        """Take a function that returns the file's current content."""
        self._read, self._time_seconds = read, time_seconds

    async def fetch(self) -> BearerToken:
        """Return the token in the file; raise `UnavailableError` if it is invalid or expired."""
        try:
            return BearerToken.parse(self._read(), now_seconds=self._time_seconds())
        except ValueError as error:
            raise UnavailableError(
                f"kafka.oauth.token_file: the token cannot be used: {error}; write a new one to it"
            ) from error

    def is_due(self, token: BearerToken, *, now_seconds: float) -> bool:
        """Return whether the file contains a token other than `token`, or `token` has expired."""
        return now_seconds >= token.end_seconds or self._read() != token.text


@dataclass(frozen=True, kw_only=True)
class Login:
    """A connection's login: the token, the time and the session's length."""

    token: BearerToken
    begin_seconds: float
    """Monotonic time of the login."""
    session_seconds: float
    """How long the broker keeps the session open; infinite if it did not report that."""

    def is_due(self, token: BearerToken, *, now_seconds: float) -> bool:
        """Return whether the connection should log in again with the token at this monotonic time.

        A login is due if the token is new, or if the session is about to end before the token
        expires, which the brokers' `connections.max.reauth.ms` can cause.
        """
        passed_seconds = now_seconds - self.begin_seconds
        if passed_seconds < _MIN_LOGIN_SECONDS:
            return False
        return token.text != self.token.text or passed_seconds > SAFE_RATIO * self.session_seconds


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc]  # as above
    """Logs connections in with the current token, and again when it changes."""

    def __init__(
        self,
        source: TokenSource[BearerToken],
        *,
        check: Check,
        on_token: Callable[[str], None] = lambda _text: None,
        time_seconds: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        """Take the source of tokens, and the check that fails if it provides none.

        `on_token` is called with each token before the token is sent anywhere.
        """
        self._tokens = TokenInForce(
            source,
            check=check,
            on_token=on_token,
            time_seconds=time_seconds,
            monotonic=monotonic,
            backoff=backoff,
        )
        self._time_seconds, self._monotonic = time_seconds, monotonic
        self._logins: WeakKeyDictionary[AIOKafkaConnection, Login] = WeakKeyDictionary()
        self._timer: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None

    @override
    async def token(self) -> str:
        """Return the current token's text; raise `TokenUnavailableError` if there is none."""
        return (await self.in_force()).text

    async def in_force(self) -> BearerToken:
        """Return the current token; raise `TokenUnavailableError` if there is none."""
        try:
            return await self._tokens.current()
        except UnavailableError as error:
            raise TokenUnavailableError(str(error)) from error

    async def log_in(self, connection: AIOKafkaConnection) -> None:
        """Log in a new connection; raise `TokenUnavailableError` or aiokafka's errors."""
        await self._log_in(connection, await self.in_force(), is_again=False)

    async def _log_in(
        self, connection: AIOKafkaConnection, token: BearerToken, *, is_again: bool
    ) -> None:
        begin_seconds = self._monotonic()
        try:
            session_seconds = await log_in_by_token(connection, token.text, is_again=is_again)
        except SaslAuthenticationFailed as error:
            self._tokens.refuse(token, f"a broker rejected the token: {error}")
            raise
        # If the session ends with its token, logging in again with the same token is useless.
        rest_seconds = token.end_seconds - self._time_seconds()
        if session_seconds > rest_seconds - _MIN_LOGIN_SECONDS:
            session_seconds = math.inf
        self._logins[connection] = Login(
            token=token, begin_seconds=begin_seconds, session_seconds=session_seconds
        )
        self._tokens.confirm(token)
        if self._timer is None:
            self._check_later()

    def _check_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        """Start a renewal and schedule the next check; stop if no connection is open."""
        self._timer = None
        if not self._living():
            return
        self._check_later()
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    def _living(self) -> list[tuple[AIOKafkaConnection, Login]]:
        return [item for item in self._logins.items() if item[0].connected()]

    async def _renew(self) -> None:
        """Fetch a token if one is due, and log in again on each connection that needs it."""
        try:
            token = await self.in_force()
        except TokenUnavailableError:
            return  # the check and each failed login report the cause
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
            # The connection stays open, because a broker answers requests one after another, and
            # some take half a minute. If the login fails, the broker closes the connection once the
            # session has expired.
            self._logins.pop(connection, None)
        except (KafkaError, OSError):
            # Pending requests fail with a lost connection and are repeated over a new one.
            connection.close()
