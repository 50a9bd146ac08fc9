"""The alerts sink's shell: events and incidents in, alerts out to every Alertmanager.

What is an alert is decided in `rules` and `engine`, sending is `receivers`'; the consume loop is
`sinks.consuming`'s, and calls `take` at least twice a second, with or without records.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog

from gpuledger.addresses import shown_url
from gpuledger.bus.protocol import Bus, TopicPartition
from gpuledger.clock import Clock, SystemClock
from gpuledger.codec import Decoder
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger.service import Check, Readiness, Severity
from gpuledger.service.http.client import open_http
from gpuledger.topics import ATTRIBUTED_INCIDENTS, EVENTS
from gpuledger.twins import twin_of
from sinks.alerts.client import HEADERS, AlertmanagerClient
from sinks.alerts.engine import Watch
from sinks.alerts.receivers import NAME, Checked, Receivers
from sinks.alerts.rules import rules_of
from sinks.alerts.settings import AlertsSettings
from sinks.alerts.standing import Now
from sinks.consuming import consume
from sinks.credentials import watch_credentials
from sinks.metrics import count_dropped
from sinks.protocol import Batch, Consuming, Desk, Partitions
from sinks.timelines import Place

GROUP: Final = "gpuledger-alerts"
_KEPT_NS: Final = (ATTRIBUTED_INCIDENTS.retention_ms or 0) * 1_000_000
_UNJUDGED: Final = {Place.REPEATED: "duplicate", Place.SUPERSEDED: "superseded"}
"""Why an event is not held against the rules, by where it stands."""
_log = structlog.get_logger(__name__)


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
    async with _open_clients(settings, readiness) as clients:
        receivers = [
            Checked(client=client, check=_check_of(client.url, readiness)) for client in clients
        ]
        sink = AlertsSink(receivers=receivers, settings=settings, clock=clock, check=receiver)
        try:
            await consume(bus=bus, sink=sink, how=how, check=check, gaps=gaps, clock=clock)
        finally:
            await sink.close()


@asynccontextmanager
async def _open_clients(
    settings: AlertsSettings, readiness: Readiness
) -> AsyncIterator[list[AlertmanagerClient]]:
    credentials = watch_credentials(settings, section=NAME, readiness=readiness)
    async with open_http(headers=HEADERS, timeout_seconds=settings.timeout_seconds) as http:
        yield [
            AlertmanagerClient(http=http, url=url, credentials=credentials) for url in settings.urls
        ]


class AlertsSink:
    """Judges the events of each partition and keeps every Alertmanager told."""

    name = NAME

    def __init__(
        self,
        *,
        receivers: Sequence[Checked],
        settings: AlertsSettings,
        clock: Clock,
        check: Check,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._rules = rules_of(settings)
        self._watches: dict[int, Watch] = {}
        self._receivers = Receivers(
            receivers,
            standing=lambda: [watch.alerts for watch in self._watches.values()],
            check=check,
            clock=clock,
            resend_ns=round(settings.resend_seconds * 1e9),
        )

    async def assign(self, partitions: Partitions, desk: Desk) -> None:  # a sink's method
        """Begin without any state: `for` begins anew."""

    async def prepare(self, desk: Desk) -> Partitions:  # noqa: ARG002  # a sink's method
        """Nothing has to come before."""
        return frozenset()

    async def take(self, batches: Sequence[Batch], desk: Desk) -> None:
        """Judge what was polled, tell what is due, and only then say that it is done."""
        newest_ns = {batch.partition: self._judge(batch) for batch in batches}
        self._forget()
        await self._receivers.tell()
        for batch in batches:
            # What was given up meanwhile was not told, and the desk does not hear of it.
            partition = batch.partition
            desk.acknowledge(partition, batch.next_offset, time_ns=newest_ns[partition])

    async def release(self, partitions: Partitions, desk: Desk) -> None:  # noqa: ARG002  # a sink's method
        """Forget these without ending their alerts: the next owner goes on, or they end."""
        for partition in partitions:
            self._watches.pop(partition.partition, None)
        self._receivers.look_again()

    async def close(self) -> None:
        """End what is on its way to the Alertmanagers."""
        await self._receivers.close()

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


def _check_of(url: str, readiness: Readiness) -> Check:
    return readiness.check(f"alerts.alertmanager {shown_url(url)}", severity=Severity.WARNING)
