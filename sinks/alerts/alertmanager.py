"""The seam to one Alertmanager: one method.

Here lives what its refusals mean. Alertmanager answers 400 where single alerts are not valid,
having taken the others, and 400 or 422 where it has taken none, as it could not read the request;
both in JSON. What else is answered says nothing of the alerts: an address that leads elsewhere, a
password that is wrong, a proxy's own page.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import orjson

from gpuledger import __version__
from gpuledger.runtime.http.client import HttpAnswer, HttpClient, NoAnswerError
from sinks.answers import explain
from sinks.credentials import CredentialsInForce, ReceiverCredentials
from sinks.errors import ReceiverUnavailableError, RejectedError

HEADERS: Final = {"Content-Type": "application/json", "User-Agent": f"gpuledger/{__version__}"}
_REFUSES_ALERTS: Final = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})
_SETTING: Final = "alerts.urls"
_JSON: Final = "application/json"
_NO_CREDENTIALS: Final = CredentialsInForce(headers={}, trust=True)


class AlertmanagerClient:
    """Posts alerts to one Alertmanager."""

    def __init__(
        self, *, http: HttpClient, url: str, credentials: ReceiverCredentials | None = None
    ) -> None:
        self.url = url
        self._http, self._credentials = http, credentials

    async def post(self, alerts: Sequence[dict[str, Any]]) -> None:
        """Post alerts; return when the Alertmanager has taken them.

        Raises RejectedError where Alertmanager refuses some of these alerts, of which it may have
        taken the others, or a proxy finds them too many (413); and ReceiverUnavailableError where
        they are to be sent again: no answer, or one that does not speak of them (401, 404, 503, a
        200 with a page for people).
        """
        credentials = self._credentials.current() if self._credentials else _NO_CREDENTIALS
        try:
            answer = await self._http.post(
                f"{self.url.rstrip('/')}/api/v2/alerts",
                data=orjson.dumps(list(alerts)),
                headers=credentials.headers,
                trust=credentials.trust,
            )
        except NoAnswerError as error:
            raise ReceiverUnavailableError(str(error)) from error
        if not answer.is_success:
            raise _refusal(answer, url=self.url)
        if answer.is_page:
            # Alertmanager answers 200 with nothing in it: this is a proxy's, as one to log in on.
            raise ReceiverUnavailableError(explain(answer, url=self.url, setting=_SETTING))


def _refusal(answer: HttpAnswer, *, url: str) -> ReceiverUnavailableError | RejectedError:
    refuses_alerts = answer.status in _REFUSES_ALERTS and answer.content_type == _JSON
    if refuses_alerts or answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return RejectedError(f"{answer.status} {answer.text}")
    # How long to wait is not left to one of several: the others would be told late for it.
    return ReceiverUnavailableError(explain(answer, url=url, setting=_SETTING))
