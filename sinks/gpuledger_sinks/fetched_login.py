"""Credentials that are fetched, expire and are sent with each request; renewed once if rejected."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from http import HTTPStatus
from typing import Generic

from gpuledger.errors import UnavailableError
from gpuledger.runtime.http.client import HttpAnswer, NoAnswerError
from gpuledger.runtime.tokens import E, TokenInForce
from gpuledger.settings.secret import shown_url

Send = Callable[[Mapping[str, str]], Awaitable[HttpAnswer]]
"""Sends a request with additional headers."""


class FetchedLogin(Generic[E]):
    """Sends requests with tokens from a source."""

    def __init__(
        self,
        tokens: TokenInForce[E],
        *,
        headers_of: Callable[[E, str, bytes], Mapping[str, str]],
        refusing: Collection[int] = (HTTPStatus.UNAUTHORIZED,),
    ) -> None:
        """Use `headers_of` to make the headers of a request from its token, URL and body.

        A response status in `refusing` means that the receiver rejected the token.
        """
        self._tokens, self._headers_of, self._refusing = tokens, headers_of, refusing

    async def post(self, send: Send, *, url: str, data: bytes) -> HttpAnswer:
        """Send a request with the current token and return the response.

        If the token is rejected and another one can be fetched, the request is sent once more.
        Raises NoAnswerError if there is no response, or if no token can be fetched.
        """
        token = await self._current()
        answer = await send(self._headers_of(token, url, data))
        if self._is_taken(token, answer, url):
            return answer
        other = await self._current()
        if other is not token:
            answer = await send(self._headers_of(other, url, data))
            self._is_taken(other, answer, url)
        return answer

    def _is_taken(self, token: E, answer: HttpAnswer, url: str) -> bool:
        if answer.status in self._refusing:
            message = f"{shown_url(url)} rejected the credentials: {answer.status} {answer.text}"
            self._tokens.refuse(token, message.rstrip())
            return False
        self._tokens.confirm(token)
        return True

    async def _current(self) -> E:
        try:
            return await self._tokens.current()
        except UnavailableError as error:
            raise NoAnswerError(str(error)) from error
