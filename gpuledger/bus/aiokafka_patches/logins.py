"""Logins by passwords and tokens that change while a client lives."""

import asyncio
import math
from functools import cache
from typing import Any

from aiokafka.conn import AIOKafkaConnection, SaslPlainAuthenticator
from aiokafka.errors import NoError, SaslAuthenticationFailed, for_code
from aiokafka.protocol.admin import SaslAuthenticateRequest, SaslHandShakeRequest


@cache
def encode_password_at_login() -> None:
    """Have the password of PLAIN encoded when a connection logs in, as that of SCRAM is.

    A password may say another one by then (`CurrentPassword`); PLAIN would join its first text. Can
    go once aiokafka takes a function for a password.
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
    """Have each login by OAUTHBEARER done by its token's provider, whose `log_in` it calls.

    aiokafka takes a refusal, which comes as an answer without an error, for a login; and it keeps
    to itself what a connection is, that is to log in again, and for how long it may stay. Can go
    with KIP-368 in aiokafka (aio-libs/aiokafka#1105), if that takes a refusal for one.
    """

    def authenticator_oauth(connection: AIOKafkaConnection) -> TokenLogin:
        # A function: a class in its place would not be given the connection.
        return TokenLogin(connection)

    AIOKafkaConnection.authenticator_oauth = authenticator_oauth


class TokenLogin:
    """A connection's login: all of it at the first step."""

    def __init__(self, connection: AIOKafkaConnection) -> None:
        self._connection = connection

    async def step(self, _answer: bytes | None) -> None:
        """Log in; raises aiokafka's errors."""
        await self._connection._sasl_oauth_token_provider.log_in(self._connection)


async def log_in_by_token(connection: AIOKafkaConnection, token: str, *, is_again: bool) -> float:
    """Log a connection in; return for how many seconds, infinite where the broker does not say.

    A living connection logs in again (KIP-368) in the midst of its other requests: aiokafka sends
    at once what it is given, so that nothing comes between the two requests, as brokers want it.
    Raises aiokafka's errors, `SaslAuthenticationFailed` where the token is refused. Can go like
    `hand_logins_to_providers`.
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
