"""The seam to one Alertmanager: one method, over aiohttp.

Here lives what its refusals mean. Alertmanager answers 400 where single alerts are not valid,
having taken the others, and 400 or 422 where it has taken none, as it could not read the request;
both in JSON. What else is answered says nothing of the alerts: an address that leads elsewhere, a
password that is wrong, a proxy's own page.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import orjson

from gpuledger import __version__
from gpuledger.addresses import shown_url
from sinks.errors import ReceiverUnavailableError, RejectedError

HEADERS: Final = {"Content-Type": "application/json", "User-Agent": f"gpuledger/{__version__}"}
_REFUSES_ALERTS: Final = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})
_JSON: Final = "application/json"
_SHOWN_CHARACTERS: Final = 2000


class AlertmanagerClient:
    """Posts alerts to one Alertmanager."""

    def __init__(self, *, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def post(self, alerts: Sequence[dict[str, Any]]) -> None:
        """Post alerts; return when the Alertmanager has taken them.

        Raises RejectedError where Alertmanager refuses some of these alerts, of which it may have
        taken the others, or a proxy finds them too many (413); and ReceiverUnavailableError where
        they are to be sent again: no answer, or one that does not speak of them (401, 404, 503).
        """
        try:
            async with self._session.post(
                f"{self.url.rstrip('/')}/api/v2/alerts",
                data=orjson.dumps(list(alerts)),
                allow_redirects=False,
            ) as response:
                if response.status // 100 != HTTPStatus.OK // 100:
                    text = await response.text(errors="replace")
                    raise _refusal(response.status, response.content_type, text)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            shown = str(error) or type(error).__name__
            raise ReceiverUnavailableError(f"{shown_url(self.url)}: {shown}") from error


def _refusal(status: int, content_type: str, text: str) -> ReceiverUnavailableError | RejectedError:
    message = f"{status} {text.strip()[:_SHOWN_CHARACTERS]}"
    refuses_alerts = status in _REFUSES_ALERTS and content_type == _JSON
    if refuses_alerts or status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return RejectedError(message)
    return ReceiverUnavailableError(message)
