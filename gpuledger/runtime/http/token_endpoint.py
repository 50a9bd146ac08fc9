"""Tokens of an OAuth 2.0 token endpoint, by client credentials (RFC 6749, 4.4).

One request a token, over a connection of its own: by `post_form` with h11, which every deployable
has, or as the caller has it. An endpoint may hang, answer anything, and quote what was sent to it:
each request has a deadline, of an answer a bounded part is read, and the secret is masked in what
is shown of it.
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
"""How long one request may take, from the name's look-up to the last byte."""
MAX_BODY_BYTES: Final = 64 * 1024
"""The longest answer that is taken."""
_SHOWN_BYTES: Final = 2048
_REFUSED_CLIENT: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)

FormPost = Callable[[str, bytes, Mapping[str, str]], Awaitable[tuple[int, bytes]]]
"""Posts a form to an address with headers, never following it elsewhere; returns status and body.

Raises OSError, `ValueError`, TimeoutError, h11's error or `UnavailableError`, none with the address
in it.
"""


class TokenEndpoint:
    """Asks for a token, and again before it ends."""

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
        """Take what returns the client's secret that is in force, and what asks the endpoint.

        `group` is the name of the settings' group, such as `kafka.oauth`.
        """
        self._settings, self._group = settings, group
        self._secret, self._post = secret, post
        self._deadline_seconds, self._time_seconds = deadline_seconds, time_seconds
        self._renew_seconds = math.inf

    async def fetch(self) -> BearerToken:
        """Return a new token; raises `UnavailableError` naming the endpoint and what is wrong."""
        settings, secret = self._settings, self._secret()
        form_fields = {"grant_type": "client_credentials", **settings.parameters}
        if settings.scope:
            form_fields["scope"] = settings.scope
        # Both are encoded as in a form before they are joined (RFC 6749, 2.3.1).
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
            message = f"{error.verify_message}; look at {self._group}.ca_file"
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
        """Return whether most of the token's time is over."""
        return now_seconds >= min(self._renew_seconds, token.end_seconds)

    def _read(self, status: int, body: bytes, sent: BasicCredentials) -> BearerToken:
        """Return the token of an answer; raises `ValueError` saying what it has instead."""
        if status != HTTPStatus.OK:
            message = sent.mask(body[:_SHOWN_BYTES].decode(errors="replace"))
            group = self._group
            remedy = (
                f"{group}.client_id, {group}.client_secret_file, {group}.scope and"
                f" {group}.parameters"
                if status in _REFUSED_CLIENT
                else f"{group}.token_url"
            )
            raise ValueError(f"answered {status}: {message}; look at {remedy}")
        try:
            found: Any = json.loads(body)
        except ValueError:
            found = None
        text = found.get("access_token") if isinstance(found, dict) else None
        if not text or not isinstance(text, str):
            # Not shown: a success may have a token in it, in whatever form.
            raise ValueError(
                'answered 200 without a JSON object that has a text "access_token"; look at'
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
    """Return status and body; a `FormPost` over TLS, by no proxy."""
    return await request_once(
        "POST", url, headers, body=form, context=context, max_bytes=MAX_BODY_BYTES
    )


def _valid_for(expires_in: object) -> float:
    """Return the seconds of `expires_in`, which some write as a text; infinite without."""
    try:
        seconds = float(expires_in) if isinstance(expires_in, int | float | str) else math.inf
    except ValueError:
        return math.inf
    return math.inf if math.isnan(seconds) else seconds
