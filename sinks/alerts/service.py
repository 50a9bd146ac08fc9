"""The alerts sink's shell: events and incidents in, alerts out to every Alertmanager.

Here live sending and sending again. What is an alert is decided in `rules` and `engine`; the
consume loop is `sinks.consuming`'s, and calls `take` at least twice a second, with or without
records.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import structlog

from gpuledger.addresses import shown_url
from gpuledger.bus.protocol import Bus, TopicPartition
from gpuledger.clock import Clock, SystemClock
from gpuledger.codec import Decoder
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger.service import Backoff, Check, Readiness, Severity
from gpuledger.service.repeats import Repeats
from gpuledger.topics import ATTRIBUTED_INCIDENTS, EVENTS
from gpuledger.twins import twin_of
from sinks.alerts.client import HEADERS, AlertmanagerClient
from sinks.alerts.engine import Watch
from sinks.alerts.rules import rules_of
from sinks.alerts.settings import AlertsSettings
from sinks.alerts.standing import SECOND_NS, Now, Standing, mark_refused, mark_told
from sinks.consuming import consume
from sinks.errors import ReceiverUnavailableError, RejectedError
from sinks.metrics import SENT_TOTAL, count_dropped
from sinks.protocol import Batch, Consuming, Desk, Partitions
from sinks.retrying import until_answered
from sinks.timelines import Place

GROUP: Final = "gpuledger-alerts"
NAME: Final = "alerts"
_ALERTS_PER_POST: Final = 256
_KEPT_NS: Final = (ATTRIBUTED_INCIDENTS.retention_ms or 0) * 1_000_000
_UNJUDGED: Final = {Place.REPEATED: "duplicate", Place.SUPERSEDED: "superseded"}
"""Why an event is not held against the rules, by where it stands."""
_REFUSAL_SHOWN_NS: Final = 600 * SECOND_NS
"""For how long checks tell of an alert that was refused."""
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


async def run_alerts(
    *,
    bus: Bus,
    settings: AlertsSettings,
    readiness: Readiness,
    member: str | None = None,
    group: str = GROUP,
    clock: Clock | None = None,
) -> None:
    """Hold the rules against every event and tell the Alertmanagers, until cancelled."""
    clock = clock or SystemClock()
    receiver = readiness.check("alerts.receiver", severity=Severity.WARNING)
    receiver.ok("nothing sent yet")
    how = Consuming(
        group=group,
        member=member,
        decoders={
            EVENTS.name: Decoder(topic=EVENTS.name, record=twin_of(GpuEvent)),
            ATTRIBUTED_INCIDENTS.name: Decoder(
                topic=ATTRIBUTED_INCIDENTS.name, record=twin_of(AttributedIncident)
            ),
        },
        poll_records=settings.poll_records,
        receiver=", ".join(map(shown_url, settings.urls)),
    )
    gaps = readiness.check("alerts.gaps", severity=Severity.WARNING)
    check = readiness.check("alerts.bus")
    async with _open_clients(settings) as clients:
        receivers = [Receiver(client, check=_check_of(client.url, readiness)) for client in clients]
        sink = AlertsSink(receivers=receivers, settings=settings, clock=clock, check=receiver)
        await consume(bus=bus, sink=sink, how=how, check=check, gaps=gaps, clock=clock)


@asynccontextmanager
async def _open_clients(settings: AlertsSettings) -> AsyncIterator[list[AlertmanagerClient]]:
    timeout = aiohttp.ClientTimeout(total=settings.timeout_seconds)
    async with aiohttp.ClientSession(headers=HEADERS, timeout=timeout) as session:
        yield [AlertmanagerClient(session=session, url=url) for url in settings.urls]


class Refusals:
    """What a check says of alerts that were refused, for as long as that is of interest."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._until_ns = 0
        self._detail = ""

    def note(self, detail: str, *, now_ns: int) -> None:
        """Record that an alert was refused; the check fails once the attempt has ended."""
        self._detail, self._until_ns = f"rejected: {detail}", now_ns + _REFUSAL_SHOWN_NS

    def show(self, receiver: str, *, now_ns: int) -> None:
        """Pass the check after an answer, unless something was refused a short while ago."""
        if now_ns < self._until_ns:
            self._check.failed(self._detail)
        else:
            self._check.ok(receiver)


class Receiver:
    """One Alertmanager, and when it may be tried again after it did not answer."""

    def __init__(self, client: AlertmanagerClient, *, check: Check) -> None:
        self.client = client
        self.check = check
        check.ok("nothing sent yet")
        self.refusals = Refusals(check)
        self.not_before_ns = 0
        self.backoff = Backoff()


class AlertsSink:
    """Judges the events of each partition and keeps every Alertmanager told."""

    name = NAME

    def __init__(
        self,
        *,
        receivers: Sequence[Receiver],
        settings: AlertsSettings,
        clock: Clock,
        check: Check,
    ) -> None:
        self._receivers = receivers
        self._settings, self._clock, self._check = settings, clock, check
        self._refusals = Refusals(check)
        self._resend_ns = round(settings.resend_seconds * 1e9)
        self._rules = rules_of(settings)
        self._watches: dict[int, Watch] = {}

    async def assign(self, partitions: Partitions, desk: Desk) -> None:  # a sink's method
        """Begin without any state: `for` begins anew."""

    async def prepare(self, desk: Desk) -> Partitions:  # noqa: ARG002  # a sink's method
        """Nothing has to come before."""
        return frozenset()

    async def take(self, batches: Sequence[Batch], desk: Desk) -> None:
        """Judge what was polled, tell what is due, and only then say that it is done."""
        newest_ns = {batch.partition: self._judge(batch) for batch in batches}
        self._forget()
        await until_answered(
            lambda _: self._tell(),
            sink=NAME,
            check=self._check,
            clock=self._clock,
            on_answer=lambda: self._refusals.show("", now_ns=self._clock.monotonic_ns()),
        )
        for batch in batches:
            desk.acknowledge(batch.partition, batch.next_offset, time_ns=newest_ns[batch.partition])

    async def release(self, partitions: Partitions, desk: Desk) -> None:  # noqa: ARG002  # a sink's method
        """Forget these without ending their alerts: the next owner goes on, or they end."""
        for partition in partitions:
            self._watches.pop(partition.partition, None)

    def _judge(self, batch: Batch) -> int | None:
        newest_ns: int | None = None
        watch, now = self._watch(batch.partition), Now.of(self._clock)
        for _, value in batch.items:
            if batch.partition.topic == EVENTS.name:
                newest_ns = value.time_ns
                if reason := _UNJUDGED.get(watch.judge(value, now=now)):
                    count_dropped(NAME, reason)
            else:
                self._take_incident(watch, value, now)
        return newest_ns

    def _watch(self, partition: TopicPartition) -> Watch:
        # Equally numbered partitions of both topics come to the same consumer.
        if (watch := self._watches.get(partition.partition)) is None:
            watch = self._watches[partition.partition] = Watch(rules=self._rules)
        return watch

    def _take_incident(self, watch: Watch, taken: AttributedIncident, now: Now) -> None:
        """Alert of an incident, unless it is long past.

        One that is older than the topic keeps records has not waited there: its node's clock is
        wrong, as one in 1970, and when it happened is not known.
        """
        age_ns = watch.age_ns(taken, now=now)
        if self._settings.incident_age_seconds * 1e9 < age_ns <= _KEPT_NS:
            count_dropped(NAME, "too_old")
            return
        hold_ns = round(self._settings.incident_hold_seconds * 1e9)
        if watch.take_incident(taken, hold_ns=hold_ns, now=now):
            count_dropped(NAME, "too_many")

    def _forget(self) -> None:
        silent_ns = round(self._settings.silent_seconds * 1e9)
        for watch in self._watches.values():
            silent = watch.forget(now=Now.of(self._clock), silent_ns=silent_ns)
            if silent:
                _log.warning("silent_alerts_dropped", count=silent)

    async def _tell(self) -> None:
        """Tell every Alertmanager what it is due; done when one of them has answered it all."""
        now_ns = self._clock.monotonic_ns()
        ready = [one for one in self._receivers if one.not_before_ns <= now_ns] or self._receivers
        errors = await asyncio.gather(*(self._tell_one(one) for one in ready))
        failures = [error for error in errors if error is not None]
        if len(failures) == len(ready):
            raise failures[0]

    async def _tell_one(self, receiver: Receiver) -> ReceiverUnavailableError | None:
        now, url = Now.of(self._clock), receiver.client.url
        due = [
            alert
            for watch in self._watches.values()
            for alert in watch.alerts.due(url, now=now, resend_ns=self._resend_ns)
        ]
        try:
            for start in range(0, len(due), _ALERTS_PER_POST):
                await self._post(receiver, due[start : start + _ALERTS_PER_POST], now)
        except ReceiverUnavailableError as error:
            receiver.not_before_ns = now.monotonic_ns + round(receiver.backoff.next_seconds() * 1e9)
            receiver.check.failed(str(error))
            return error
        receiver.backoff.reset()
        receiver.refusals.show("", now_ns=now.monotonic_ns)
        return None

    async def _post(self, receiver: Receiver, alerts: Sequence[Standing], now: Now) -> None:
        payload: list[dict[str, Any]] = [
            alert.as_json(now=now, resend_ns=self._resend_ns) for alert in alerts
        ]
        try:
            await receiver.client.post(payload)
        except RejectedError as error:
            if len(alerts) > 1:
                # Which of them it is, only the answers to fewer of them tell.
                middle = len(alerts) // 2
                await self._post(receiver, alerts[:middle], now)
                await self._post(receiver, alerts[middle:], now)
            else:
                self._refuse(receiver, alerts[0], str(error), now)
        else:
            SENT_TOTAL.labels(sink=NAME).inc(len(alerts))
            mark_told(alerts, receiver.client.url, now=now)

    def _refuse(self, receiver: Receiver, alert: Standing, error: str, now: Now) -> None:
        """Go on without an alert that an Alertmanager refuses; it is asked again in its time."""
        url = receiver.client.url
        shown = f"{shown_url(url)}: {error}"
        self._refusals.note(shown, now_ns=now.monotonic_ns)
        receiver.refusals.note(error, now_ns=now.monotonic_ns)
        if mark_refused(alert, url, now=now):
            count_dropped(NAME, "rejected")
        if count := _repeats.count(url):
            _log.warning("alerts_rejected", url=shown_url(url), count=count, error=error)


def _check_of(url: str, readiness: Readiness) -> Check:
    return readiness.check(f"alerts.alertmanager {shown_url(url)}", severity=Severity.WARNING)
