"""Logins with passwords and tokens that change while a client is open."""

import asyncio
import math
from functools import cache
from typing import Any

from aiokafka.conn import AIOKafkaConnection, SaslPlainAuthenticator
from aiokafka.errors import NoError, SaslAuthenticationFailed, for_code
from aiokafka.protocol.admin import SaslAuthenticateRequest, SaslHandShakeRequest


@cache
def encode_password_at_login() -> None:
    """Make PLAIN encode the password when a connection logs in, as SCRAM does.

    Only the `encode` method of a `CurrentPassword` returns the current password. aiokafka's PLAIN
    would send the text, which is a mask. Remove once aiokafka accepts a function as password.
    """

    def authenticator_plain(connection: Any) -> Any:  # noqa: ANN401  # aiokafka publishes no types
        return SaslPlainAuthenticator(
            loop=connection._loop,
            sasl_plain_username=connection._sasl_plain_username,
            sasl_plain_password=connection._sasl_plain_password.encode().decode(),
        )

    AIOKafkaConnection.authenticator_plain = authenticator_plain


@cache
def hand_logins_to_providers() -> None:
    """Make OAUTHBEARER logins call the `log_in` method of their token provider.

    A broker reports a rejected token in a response without an error code, and aiokafka mistakes
    that response for a successful login. aiokafka also gives a token provider neither the
    connection, which has to log in again, nor the session's lifetime. Remove once aiokafka
    implements KIP-368 (aio-libs/aiokafka#1105) and detects rejected tokens.
    """

    def authenticator_oauth(connection: AIOKafkaConnection) -> TokenLogin:
        # A function, because a class assigned here would not be bound to the connection.
        return TokenLogin(connection)

    AIOKafkaConnection.authenticator_oauth = authenticator_oauth


class TokenLogin:
    """The login of one connection by token, which is complete after one step."""

    def __init__(self, connection: AIOKafkaConnection) -> None:
        self._connection = connection

    async def step(self, _answer: bytes | None) -> None:
        """Log in; raise aiokafka's errors."""
        await self._connection._sasl_oauth_token_provider.log_in(self._connection)


async def log_in_by_token(connection: AIOKafkaConnection, token: str, *, is_again: bool) -> float:
    """Log in a connection; return the session's lifetime in seconds, infinite if not reported.

    An open connection logs in again (KIP-368) between its other requests. The two
    requests of a login must follow each other directly; aiokafka sends requests immediately.
    Raises aiokafka's errors, `SaslAuthenticationFailed` if the token is rejected. Remove together
    with `hand_logins_to_providers`.
    """
    requests: list[Any] = [SaslHandShakeRequest("OAUTHBEARER")] if is_again else []
    requests.append(SaslAuthenticateRequest(f"n,,\x01auth=Bearer {token}\x01\x01".encode()))
    answers = await asyncio.gather(*map(connection.send, requests), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if for_code(answer.error_code) is not NoError:
            message = getattr(answer, "error_message", None) or ""
            raise for_code(answer.error_code)(f"OAUTHBEARER: {message}")
    last: Any = answers[-1]
    if last.sasl_auth_bytes:
        message = last.sasl_auth_bytes.decode(errors="replace")
        raise SaslAuthenticationFailed(f"OAUTHBEARER: {message}")
    lifetime_ms = getattr(last, "session_lifetime_ms", 0)
    return lifetime_ms / 1000 if lifetime_ms > 0 else math.inf
