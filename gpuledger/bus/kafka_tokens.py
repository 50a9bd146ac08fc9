"""The token of a login by OAUTHBEARER: a file's, and who is logged in with which.

Which token is in force is decided in `gpuledger.runtime.tokens`. With a new one each living
connection logs in again: brokers close one whose session has ended. They learn of it in the midst
of other requests, so nothing has to be stopped.
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
"""How long a login must have stood: brokers refuse a second one within a second."""


class TokenUnavailableError(KafkaError):  # type: ignore[misc]  # aiokafka publishes no types
    """There is no token to log in with: for the client a connection that failed."""


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
        return token.text != self.token.text or passed_seconds > SAFE_RATIO * self.session_seconds


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc]  # as above
    """Has the connections that are logged in, and logs them in with the token in force."""

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
        """Take where tokens come from, and the check that fails where none does.

        `on_token` is called with each token before it is sent anywhere.
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
        """Return the token to log in with now; raises `TokenUnavailableError`."""
        return (await self.in_force()).text

    async def in_force(self) -> BearerToken:
        """Return the token to log in with now; raises `TokenUnavailableError`."""
        try:
            return await self._tokens.current()
        except UnavailableError as error:
            raise TokenUnavailableError(str(error)) from error

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
            self._tokens.refuse(token, f"a broker refuses the token: {error}")
            raise
        # A session that ends with its token is not longer by logging in with the same one.
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
        """Have what is due renewed; end with the last connection, as nobody needs a token then."""
        self._timer = None
        if not self._living():
            return
        self._check_later()
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
