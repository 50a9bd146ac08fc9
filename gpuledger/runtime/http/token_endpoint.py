"""Tokens from an OAuth 2.0 token endpoint, by client credentials (RFC 6749, section 4.4).

Each token is requested over a separate connection, by a function of the caller. `post_form` is such
a function; it uses h11, which every component has. An endpoint may hang, answer anything, or quote
the request. So each request has a deadline, the answer's size is limited, and secrets are masked in
error messages.
"""

import asyncio
import base64
import json
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote_plus, urlencode

import h11

from gpuledger.errors import UnavailableError
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.runtime.http.single_request import request_once
from gpuledger.runtime.tokens import BearerToken, spread_renewal
from gpuledger.settings.groups import ClientCredentialsSettings
from gpuledger.settings.secret import shown_url
from gpuledger.texts import readable

DEADLINE_SECONDS: Final = 10.0
"""Timeout of a request, from the name look-up to the last byte."""
MAX_BODY_BYTES: Final = 64 * 1024
"""Maximum size of an answer's body."""
_SHOWN_BYTES: Final = 2048
_REFUSED_CLIENT: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)

FormPost = Callable[[str, bytes, Mapping[str, str]], Awaitable[tuple[int, bytes]]]
"""Posts a form to a URL with headers, without following redirects; returns status and body.

Raises `OSError`, `ValueError`, `TimeoutError`, h11's errors or `UnavailableError`; no message
contains the address.
"""


class TokenEndpoint:
    """Requests tokens from an endpoint, and decides when the next one is due."""

    def __init__(
        self,
        settings: ClientCredentialsSettings,
        *,
        group: str,
        secret: Callable[[], str],
        post: FormPost,
        deadline_seconds: float = DEADLINE_SECONDS,
        time_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Take two functions: `secret` returns the client secret, and `post` sends the request.

        `group` is the name of the settings group, such as `kafka.oauth`.
        """
        self._settings, self._group = settings, group
        self._secret, self._post = secret, post
        self._deadline_seconds, self._time_seconds = deadline_seconds, time_seconds
        self._renew_seconds = math.inf

    async def fetch(self) -> BearerToken:
        """Return a new token; raise `UnavailableError` with the endpoint and the cause."""
        settings, secret = self._settings, self._secret()
        form_fields = {"grant_type": "client_credentials", **settings.parameters}
        if settings.scope:
            form_fields["scope"] = settings.scope
        # Both are form-encoded before they are joined (RFC 6749, section 2.3.1).
        login = f"{quote_plus(settings.client_id)}:{quote_plus(secret)}".encode()
        headers = {"Authorization": f"Basic {base64.b64encode(login).decode()}"}
        sent = BasicCredentials(
            (
                *BasicCredentials.sent(settings.token_url, headers).secrets,
                secret,
                *settings.parameters.values(),
            )
        )
        try:
            async with asyncio.timeout(self._deadline_seconds):
                form = urlencode(form_fields).encode()
                status, body = await self._post(settings.token_url, form, headers | _FORM)
            token = self._read(status, body, sent)
        except TimeoutError as error:
            raise self._error(f"no answer within {self._deadline_seconds:g} s") from error
        except ssl.SSLCertVerificationError as error:
            message = f"{error.verify_message}; check {self._group}.ca_file"
            raise self._error(message) from error
        except h11.RemoteProtocolError as error:
            raise self._error(f"no valid HTTP: {readable(sent.mask(str(error)))}") from error
        except UnavailableError as error:
            raise self._error(readable(sent.mask(str(error)))) from error
        except (OSError, ValueError, RecursionError) as error:
            raise self._error(readable(str(error)) or type(error).__name__) from error
        self._renew_seconds = spread_renewal(token)
        return token

    def is_due(self, token: BearerToken, *, now_seconds: float) -> bool:
        """Return whether to request a new token: after about 80 % of this token's lifetime."""
        return now_seconds >= min(self._renew_seconds, token.end_seconds)

    def _read(self, status: int, body: bytes, sent: BasicCredentials) -> BearerToken:
        """Return the token in an answer; raise `ValueError` if it contains none."""
        if status != HTTPStatus.OK:
            message = sent.mask(body[:_SHOWN_BYTES].decode(errors="replace"))
            group = self._group
            remedy = (
                f"{group}.client_id, {group}.client_secret_file, {group}.scope and"
                f" {group}.parameters"
                if status in _REFUSED_CLIENT
                else f"{group}.token_url"
            )
            raise ValueError(f"answered {status}: {message}; check {remedy}")
        try:
            found: Any = json.loads(body)
        except ValueError:
            found = None
        text = found.get("access_token") if isinstance(found, dict) else None
        if not text or not isinstance(text, str):
            # The body is not shown, because a success may contain a token in any form.
            raise ValueError(
                'answered 200 without a JSON object with a string "access_token"; check'
                f" {self._group}.token_url"
            )
        kind = found.get("token_type", "bearer")
        if not isinstance(kind, str) or kind.lower() != "bearer":
            raise ValueError('answered with a token whose "token_type" is not Bearer')
        try:
            return BearerToken.parse(
                text,
                now_seconds=self._time_seconds(),
                for_seconds=_valid_for(found.get("expires_in")),
            )
        except ValueError as error:
            raise ValueError(f"answered with a token that cannot be used: {error}") from None

    def _error(self, message: str) -> UnavailableError:
        return UnavailableError(
            f"{self._group}.token_url {shown_url(self._settings.token_url)}: {message}"
        )


_FORM: Final = {
    "User-Agent": "gpuledger",
    "Accept": "application/json",
    "Content-Type": "application/x-www-form-urlencoded",
}


async def post_form(
    url: str, form: bytes, headers: Mapping[str, str], *, context: ssl.SSLContext
) -> tuple[int, bytes]:
    """Post a form over TLS without a proxy; return status and body (see `FormPost`)."""
    return await request_once(
        "POST", url, headers, body=form, context=context, max_bytes=MAX_BODY_BYTES
    )


def _valid_for(expires_in: object) -> float:
    """Return `expires_in` in seconds; infinite if it is missing or invalid.

    Some endpoints send a string.
    """
    try:
        seconds = float(expires_in) if isinstance(expires_in, int | float | str) else math.inf
    except ValueError:
        return math.inf
    return math.inf if math.isnan(seconds) else seconds
