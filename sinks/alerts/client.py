"""The seam to one Alertmanager: one method, over aiohttp."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import orjson

from gpuledger import __version__
from gpuledger.addresses import shown_url
from sinks.errors import ReceiverUnavailableError, RejectedError

HEADERS: Final = {"Content-Type": "application/json", "User-Agent": f"gpuledger/{__version__}"}
_SHOWN_CHARACTERS: Final = 2000


class AlertmanagerClient:
    """Posts alerts to one Alertmanager."""

    def __init__(self, *, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def post(self, alerts: Sequence[dict[str, Any]]) -> None:
        """Post alerts; return when the Alertmanager has taken them.

        Raises ReceiverUnavailableError where it is to be tried again (no answer, 5xx, 429), and
        RejectedError where some of them are not valid: those that are it has taken nonetheless.
        """
        try:
            async with self._session.post(
                f"{self.url.rstrip('/')}/api/v2/alerts",
                data=orjson.dumps(list(alerts)),
                allow_redirects=False,
            ) as response:
                _check(response.status, await response.text())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            shown = str(error) or type(error).__name__
            raise ReceiverUnavailableError(f"{shown_url(self.url)}: {shown}") from error


def _check(status: int, text: str) -> None:
    if status // 100 == HTTPStatus.OK // 100:
        return
    message = f"{status} {text.strip()[:_SHOWN_CHARACTERS]}"
    is_client_error = status // 100 == HTTPStatus.BAD_REQUEST // 100
    if is_client_error and status != HTTPStatus.TOO_MANY_REQUESTS:
        raise RejectedError(message)
    raise ReceiverUnavailableError(message)
