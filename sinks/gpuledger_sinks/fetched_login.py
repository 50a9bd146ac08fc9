"""A login that is fetched and ends, shown with each request: renewed once where it is refused."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from http import HTTPStatus
from typing import Generic

from gpuledger.errors import UnavailableError
from gpuledger.runtime.http.client import HttpAnswer, NoAnswerError
from gpuledger.runtime.tokens import E, TokenInForce
from gpuledger.settings.secret import shown_url

Send = Callable[[Mapping[str, str]], Awaitable[HttpAnswer]]
"""Sends a request with further headers."""


class FetchedLogin(Generic[E]):
    """Tokens of a source, and how a request shows them."""

    def __init__(
        self,
        tokens: TokenInForce[E],
        *,
        headers_of: Callable[[E, str, bytes], Mapping[str, str]],
        refusing: Collection[int] = (HTTPStatus.UNAUTHORIZED,),
    ) -> None:
        """Take the tokens, and the headers of one in a request to an address with a body.

        The statuses of `refusing` say that a token is not taken.
        """
        self._tokens, self._headers_of, self._refusing = tokens, headers_of, refusing

    async def post(self, send: Send, *, url: str, data: bytes) -> HttpAnswer:
        """Return the answer; raises NoAnswerError, also where no token is to be had."""
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
            message = f"{shown_url(url)} refuses the login: {answer.status} {answer.text}"
            self._tokens.refuse(token, message.rstrip())
            return False
        self._tokens.confirm(token)
        return True

    async def _current(self) -> E:
        try:
            return await self._tokens.current()
        except UnavailableError as error:
            raise NoAnswerError(str(error)) from error
