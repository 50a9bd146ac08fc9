"""The Alertmanagers: each is sent what it is due by a task of its own.

`AlertmanagerClient` is the seam to one of them, and knows what its refusals mean. Alertmanager
answers 400 where single alerts are not valid, having taken the others, and 400 or 422 where it has
taken none, as it could not read the request; both in JSON. What else is answered says nothing of
the alerts: an address that leads elsewhere, a password that is wrong, a proxy's own page.

`Receivers` sends, and says what the checks show of it. What an alert is is decided in
`active_alerts`, and what an Alertmanager is sent next in `send_order`.
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
    """Count what an Alertmanager has answered to a request; `None` is no answer."""
    status = "none" if answer is None else f"{answer.status // 100}xx"
    if answer is not None and answer.is_success and answer.is_page:
        status = "page"
    ALERTMANAGER_ANSWERS_TOTAL.labels(alertmanager=shown_url(url), status=status).inc()


class AlertmanagerClient:
    """Posts alerts to one Alertmanager."""

    def __init__(
        self, *, http: HttpClient, url: str, credentials: ReceiverCredentials | None = None
    ) -> None:
        """Take the Alertmanager; without credentials there is neither login nor proxy."""
        self.url, self._http = url, http
        self._credentials = credentials or ReceiverCredentials(
            ReceiverSettings(), section="alerts", check=Check()
        )

    async def post(self, alerts: Sequence[dict[str, Any]]) -> None:
        """Post alerts; return when the Alertmanager has taken them.

        Raises RejectedError where Alertmanager refuses some of these alerts, of which it may have
        taken the others, or a proxy finds them too many (413); and ReceiverUnavailableError where
        they are to be sent again: no answer, or one that does not speak of them (401, 404, 503, a
        200 with a page for people).
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
        # In JSON alone it is Alertmanager's own word; but 413 is a bound, whoever has set it.
        refuses_alerts = answer.status in _REFUSES_ALERTS and answer.content_type == _JSON
        if refuses_alerts or answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            raise RejectedError(f"{answer.status} {answer.text}")
        # Alertmanager answers 200 with nothing in it: a page is a proxy's, as one to log in on.
        if not answer.is_success or answer.is_page:
            # How long to wait is not left to one of several: others would be sent theirs late.
            raise ReceiverUnavailableError(explain(answer, url=self.url, setting=_SETTING))


NAME: Final = "alerts"
_REFUSAL_SHOWN_NS: Final = 10 * NS_PER_MINUTE
"""For how long checks show an alert that was refused."""
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()

AllActive = Callable[[], Iterable[ActiveAlerts]]
"""Returns all alerts that are active, as of now."""


class RejectedAlerts:
    """What a check says of alerts that were refused, for as long as that is of interest."""

    def __init__(self, check: Check, *, receiver: str) -> None:
        """Take the check and what it shows while nothing is wrong."""
        self._check, self._receiver = check, receiver
        self._until_ns = 0
        self._detail = ""

    def record(self, detail: str, *, now_ns: int) -> None:
        """Record that an alert was refused; the check fails once the attempt has ended."""
        self._detail, self._until_ns = f"rejected: {detail}", now_ns + _REFUSAL_SHOWN_NS

    def are_shown(self, *, now_ns: int) -> bool:
        """Return whether something was refused a short while ago."""
        return now_ns < self._until_ns

    def show(self, *, now_ns: int) -> None:
        """Pass the check after an answer, unless something was refused a short while ago."""
        if self.are_shown(now_ns=now_ns):
            self._check.failed(self._detail)
        else:
            self._check.ok(self._receiver)


@dataclass(frozen=True, kw_only=True)
class CheckedClient:
    """An Alertmanager's client and the check of that one."""

    client: AlertmanagerClient
    check: Check


class Receivers:
    """All Alertmanagers; one that hangs or is away holds up no other."""

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
        """Take them, and the check that fails where none of them answers."""
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
            checked.check.waits("not asked yet")
        check.waits("not asked yet")

    def begin(self) -> None:
        """Begin to send each what it is due; raises what a task of theirs has raised."""
        for receiver in self._receivers:
            receiver.begin()

    async def change(self) -> None:
        """Wait until one of them has answered or not, or `wake` is called."""
        self._changed.clear()
        await self._changed.wait()

    @property
    def are_away(self) -> bool:
        """Whether none of them answered the last attempt."""
        return all(receiver.is_away for receiver in self._receivers)

    def wake(self) -> None:
        """End the wait for a change: an attempt has ended, or alerts are gone."""
        self._changed.set()

    async def close(self) -> None:
        """End what is on its way."""
        for receiver in self._receivers:
            await receiver.close()

    def failed(self, error: ReceiverUnavailableError) -> None:
        """Record that one of them did not answer; the check fails where none does."""
        if self.are_away:
            self._check.failed(str(error))

    def refused(self, detail: str, *, now_ns: int) -> None:
        """Record that one of them refused an alert."""
        self._rejected.record(detail, now_ns=now_ns)

    def answered(self, *, now_ns: int) -> None:
        """Record that one of them has answered."""
        self._rejected.show(now_ns=now_ns)
        self.wake()


class _Receiver:
    """One Alertmanager, with at most one task that sends, for as long as it does not answer."""

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
        # An answer alone says nothing of alerts that wait for too long, so it passes no check.
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
        """Begin to send what is due, unless that is under way; raises what has ended it."""
        # A task's error is raised to nobody until its result is read: a defect must end the sink.
        if self._sending is not None and self._sending.done():
            self._sending.result()
            self._sending = None
        if self._sending is None and (self._is_due() or self._is_probe_due()):
            self._sending = asyncio.create_task(self._send())
            self._sending.add_done_callback(lambda _: self._all_receivers.wake())

    async def close(self) -> None:
        """End what is on its way."""
        await end_tasks(self._sending)
        self._sending = None

    def _is_due(self) -> bool:
        return self._send_order.is_due(self._all(), now=Now.of(self._clock))

    def _all(self) -> Iterable[ActiveAlert]:
        return chain.from_iterable(self._active())

    def _is_probe_due(self) -> bool:
        """Return whether an answer alone is wanted, as nothing is due.

        Only that passes a check which has failed, or waits for the first; and an address or a login
        that is wrong by now is to be known before the next alert.
        """
        now_ns = self._clock.monotonic_ns()
        if self._answered_ns is None or now_ns - self._answered_ns >= self._resend_ns:
            return True
        return self._check.has_failed and not self._rejected.are_shown(now_ns=now_ns)

    async def _send(self) -> None:
        """Send until nothing is due; what is sent is chosen anew for each request."""
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
            self._check.failed(f"slow: it answers, but what it is due waits {late_seconds:.0f} s")
        else:
            self._rejected.show(now_ns=now_ns)
        self._all_receivers.answered(now_ns=now_ns)

    async def _attempt(self) -> None:
        """Post what comes next; where that is nothing, an empty list brings an answer."""
        try:
            await self._post(self._send_order.next(self._all(), now=Now.of(self._clock)))
        except ReceiverUnavailableError as error:
            self.is_away = True
            self._all_receivers.failed(error)
            raise

    async def _post(self, alerts: Sequence[ActiveAlert]) -> None:
        now = Now.of(self._clock)
        # The end of each is reckoned for each attempt: Alertmanager notifies of none that is over.
        for alert in alerts:
            alert.hold_until_taken(now)
        payload = [self._posting.as_json(alert, now=now) for alert in alerts]
        try:
            await self._client.post(payload)
        except RejectedError as error:
            if len(alerts) > 1:
                # With 400 it may have taken the valid ones, with 413 or 422 it has taken none.
                # Which of them it is, only the answers to fewer of them show.
                record_partly_rejected(alerts, self._client.url)
            elif alerts:
                self._reject(alerts[0], str(error), now)
        else:
            SENT_TOTAL.labels(sink=NAME).inc(len(alerts))
            record_taken(alerts, self._client.url, now=now)

    def _reject(self, alert: ActiveAlert, error: str, now: Now) -> None:
        """Go on without an alert that an Alertmanager refuses; it is sent again in its time."""
        self._all_receivers.refused(f"{self._url}: {error}", now_ns=now.monotonic_ns)
        self._rejected.record(error, now_ns=now.monotonic_ns)
        if record_rejected(alert, self._client.url, now=now):
            count_dropped(NAME, "rejected")
        if count := _repeats.count(self._client.url):
            _log.warning("alerts_rejected", url=self._url, count=count, error=error)
