"""The Alertmanagers, each with its own task that sends the alerts due.

`AlertmanagerClient` posts to one Alertmanager and interprets its rejections. If single alerts are
invalid, Alertmanager accepts the others and answers 400. If it cannot read the request, it accepts
no alert and answers 400 or 422. These answers are JSON. Any other error has a cause outside the
alerts, such as a wrong address, a wrong password or a proxy.

`Receivers` sends alerts and reports the results in checks. `active_alerts` defines alerts, and
`send_order` selects those to send next.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, Final

import orjson
import structlog

from gpuledger import __version__
from gpuledger.clock import NS_PER_MINUTE, NS_PER_SECOND, Clock
from gpuledger.runtime import Check
from gpuledger.runtime.http.client import HttpAnswer, HttpClient, NoAnswerError
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings.secret import shown_url
from gpuledger_sinks.alerts.active_alerts import (
    ActiveAlert,
    ActiveAlerts,
    Now,
    record_partly_rejected,
    record_rejected,
    record_taken,
)
from gpuledger_sinks.alerts.posted_alert import AlertPosting
from gpuledger_sinks.alerts.send_order import SendOrder
from gpuledger_sinks.credentials import ReceiverCredentials, explain
from gpuledger_sinks.errors import ReceiverUnavailableError, RejectedError, retry_receiver
from gpuledger_sinks.metrics import ALERTMANAGER_ANSWERS_TOTAL, SENT_TOTAL, count_dropped
from gpuledger_sinks.receiver_settings import ReceiverSettings

HEADERS: Final = {"Content-Type": "application/json", "User-Agent": f"gpuledger/{__version__}"}
_REFUSES_ALERTS: Final = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})
_SETTING: Final = "alerts.urls"
_JSON: Final = "application/json"


def count_answer(url: str, answer: HttpAnswer | None) -> None:
    """Count an Alertmanager's response to a request by its status; `None` means no response."""
    status = "none" if answer is None else f"{answer.status // 100}xx"
    if answer is not None and answer.is_success and answer.is_page:
        status = "page"
    ALERTMANAGER_ANSWERS_TOTAL.labels(alertmanager=shown_url(url), status=status).inc()


class AlertmanagerClient:
    """Posts alerts to one Alertmanager."""

    def __init__(
        self, *, http: HttpClient, url: str, credentials: ReceiverCredentials | None = None
    ) -> None:
        """Post to the Alertmanager at `url`; without `credentials`, use no login and no proxy."""
        self.url, self._http = url, http
        self._credentials = credentials or ReceiverCredentials(
            ReceiverSettings(), section="alerts", check=Check()
        )

    async def post(self, alerts: Sequence[dict[str, Any]]) -> None:
        """Post alerts; return when the Alertmanager has accepted them.

        Raises RejectedError if Alertmanager rejects some or all alerts, or if the request is too
        large (413); the other alerts may have been accepted. Raises ReceiverUnavailableError if the
        alerts must be sent again: there was no response, or one that is not about the alerts (401,
        404, 503, a 200 with an HTML page).
        """
        try:
            answer = await self._credentials.post(
                self._http,
                f"{self.url.rstrip('/')}/api/v2/alerts",
                data=orjson.dumps(list(alerts)),
                headers={},
            )
        except NoAnswerError as error:
            count_answer(self.url, None)
            raise ReceiverUnavailableError(str(error)) from error
        count_answer(self.url, answer)
        # JSON shows that Alertmanager itself answered; 413 may also come from a proxy.
        refuses_alerts = answer.status in _REFUSES_ALERTS and answer.content_type == _JSON
        if refuses_alerts or answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            raise RejectedError(f"{answer.status} {answer.text}")
        # Alertmanager answers 200 with an empty body; a page is a proxy's, such as a login page.
        if not answer.is_success or answer.is_page:
            # Retry-After is ignored: the response must not decide how late alerts are sent.
            raise ReceiverUnavailableError(explain(answer, url=self.url, setting=_SETTING))


NAME: Final = "alerts"
_REFUSAL_SHOWN_NS: Final = 10 * NS_PER_MINUTE
"""How long checks show a rejected alert."""
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()

AllActive = Callable[[], Iterable[ActiveAlerts]]
"""Returns all alerts that are currently active."""


class RejectedAlerts:
    """Fails a check for ten minutes after an alert was rejected."""

    def __init__(self, check: Check, *, receiver: str) -> None:
        """Report rejections in `check`, which shows the text `receiver` while it passes."""
        self._check, self._receiver = check, receiver
        self._until_ns = 0
        self._detail = ""

    def record(self, detail: str, *, now_ns: int) -> None:
        """Record that an alert was rejected; the next call of `show` fails the check."""
        self._detail, self._until_ns = f"rejected: {detail}", now_ns + _REFUSAL_SHOWN_NS

    def are_shown(self, *, now_ns: int) -> bool:
        """Return whether an alert was rejected recently."""
        return now_ns < self._until_ns

    def show(self, *, now_ns: int) -> None:
        """Pass the check, or fail it if an alert was rejected recently."""
        if self.are_shown(now_ns=now_ns):
            self._check.failed(self._detail)
        else:
            self._check.ok(self._receiver)


@dataclass(frozen=True, kw_only=True)
class CheckedClient:
    """An Alertmanager's client with its check."""

    client: AlertmanagerClient
    check: Check


class Receivers:
    """All Alertmanagers; one that hangs or is unavailable does not delay the others."""

    def __init__(
        self,
        receivers: Sequence[CheckedClient],
        *,
        active: AllActive,
        check: Check,
        clock: Clock,
        resend_ns: int,
        posting: AlertPosting,
    ) -> None:
        """Send to these Alertmanagers.

        `check` fails if no Alertmanager answers, or if one has rejected an alert.
        """
        self._check = check
        shown = ", ".join(shown_url(checked.client.url) for checked in receivers)
        self._rejected = RejectedAlerts(check, receiver=shown)
        self._changed = asyncio.Event()
        self._receivers = [
            _Receiver(
                checked,
                all_receivers=self,
                active=active,
                clock=clock,
                resend_ns=resend_ns,
                posting=posting,
            )
            for checked in receivers
        ]
        for checked in receivers:
            checked.check.waits("not contacted yet")
        check.waits("not contacted yet")

    def begin(self) -> None:
        """Start sending the alerts that are due; raise the error of a sending task that failed."""
        for receiver in self._receivers:
            receiver.begin()

    async def change(self) -> None:
        """Wait until an Alertmanager answers, a sending task ends or `wake` is called."""
        self._changed.clear()
        await self._changed.wait()

    @property
    def are_away(self) -> bool:
        """Whether the last attempt failed at every Alertmanager."""
        return all(receiver.is_away for receiver in self._receivers)

    def wake(self) -> None:
        """End the wait of `change`, because alerts were answered or dropped."""
        self._changed.set()

    async def close(self) -> None:
        """End requests in flight."""
        for receiver in self._receivers:
            await receiver.close()

    def failed(self, error: ReceiverUnavailableError) -> None:
        """Record that one Alertmanager is unavailable; fail the check if all are."""
        if self.are_away:
            self._check.failed(str(error))

    def refused(self, detail: str, *, now_ns: int) -> None:
        """Record that one Alertmanager rejected an alert."""
        self._rejected.record(detail, now_ns=now_ns)

    def answered(self, *, now_ns: int) -> None:
        """Record that one Alertmanager has answered."""
        self._rejected.show(now_ns=now_ns)
        self.wake()


class _Receiver:
    """One Alertmanager, with at most one sending task, which retries until it gets an answer."""

    def __init__(
        self,
        checked: CheckedClient,
        *,
        all_receivers: Receivers,
        active: AllActive,
        clock: Clock,
        resend_ns: int,
        posting: AlertPosting,
    ) -> None:
        self._client, self._check = checked.client, checked.check
        self._url = shown_url(checked.client.url)
        self._rejected = RejectedAlerts(checked.check, receiver=self._url)
        self._all_receivers, self._active = all_receivers, active
        self._clock, self._resend_ns, self._posting = clock, resend_ns, posting
        # A response does not pass the check, because alerts may have waited too long.
        self._retry = retry_receiver(
            sink=NAME, check=checked.check, clock=clock, passes_check=False
        )
        self._send_order = SendOrder(checked.client.url, resend_ns=resend_ns)
        self._sending: asyncio.Task[None] | None = None
        self.is_away = False
        """Whether the last attempt was not answered."""
        self._has_more = False
        self._answered_ns: int | None = None

    def begin(self) -> None:
        """Start a sending task if alerts or a probe are due and none runs.

        Raises the error of a task that has failed.
        """
        # A task's error stays hidden until its result is read, but a defect must end the sink.
        if self._sending is not None and self._sending.done():
            self._sending.result()
            self._sending = None
        if self._sending is None and (self._is_due() or self._is_probe_due()):
            self._sending = asyncio.create_task(self._send())
            self._sending.add_done_callback(lambda _: self._all_receivers.wake())

    async def close(self) -> None:
        """End a request in flight."""
        await end_tasks(self._sending)
        self._sending = None

    def _is_due(self) -> bool:
        return self._send_order.is_due(self._all(), now=Now.of(self._clock))

    def _all(self) -> Iterable[ActiveAlert]:
        return chain.from_iterable(self._active())

    def _is_probe_due(self) -> bool:
        """Return whether to send an empty request as a probe.

        A check that failed, or waits for its first response, passes only after a response. A wrong
        address or wrong credentials must also be detected before the next alert is due.
        """
        now_ns = self._clock.monotonic_ns()
        if self._answered_ns is None or now_ns - self._answered_ns >= self._resend_ns:
            return True
        return self._check.has_failed and not self._rejected.are_shown(now_ns=now_ns)

    async def _send(self) -> None:
        """Send until no alert is due; alerts are selected again for each request."""
        while True:
            await self._retry(self._attempt)
            self._answered()
            if not self._has_more:
                return

    def _answered(self) -> None:
        self.is_away = False
        now_ns = self._answered_ns = self._clock.monotonic_ns()
        self._has_more = self._is_due()
        if self._send_order.late_ns > self._resend_ns:
            late_seconds = self._send_order.late_ns / NS_PER_SECOND
            self._check.failed(f"slow: it answers, but due alerts wait {late_seconds:.0f} s")
        else:
            self._rejected.show(now_ns=now_ns)
        self._all_receivers.answered(now_ns=now_ns)

    async def _attempt(self) -> None:
        """Post the next alerts, or an empty list as a probe; raises ReceiverUnavailableError."""
        try:
            await self._post(self._send_order.next(self._all(), now=Now.of(self._clock)))
        except ReceiverUnavailableError as error:
            self.is_away = True
            self._all_receivers.failed(error)
            raise

    async def _post(self, alerts: Sequence[ActiveAlert]) -> None:
        now = Now.of(self._clock)
        # Ends are computed for each attempt: Alertmanager does not notify of alerts that are over.
        for alert in alerts:
            alert.hold_until_taken(now)
        payload = [self._posting.as_json(alert, now=now) for alert in alerts]
        try:
            await self._client.post(payload)
        except RejectedError as error:
            if len(alerts) > 1:
                # After a 400, Alertmanager may have accepted the valid alerts; after a 413 or 422,
                # none. Only the responses to smaller batches show which alerts are invalid.
                record_partly_rejected(alerts, self._client.url)
            elif alerts:
                self._reject(alerts[0], str(error), now)
        else:
            SENT_TOTAL.labels(sink=NAME).inc(len(alerts))
            record_taken(alerts, self._client.url, now=now)

    def _reject(self, alert: ActiveAlert, error: str, now: Now) -> None:
        """Record that an alert is rejected; it is sent again after the usual interval."""
        self._all_receivers.refused(f"{self._url}: {error}", now_ns=now.monotonic_ns)
        self._rejected.record(error, now_ns=now.monotonic_ns)
        if record_rejected(alert, self._client.url, now=now):
            count_dropped(NAME, "rejected")
        if count := _repeats.count(self._client.url):
            _log.warning("alerts_rejected", url=self._url, count=count, error=error)
