"""The alerts sink's shell: events and incidents in, alerts out to every Alertmanager.

What is an alert is decided in `rules` and `engine`, sending is `receivers`'; the consume loop is
`sinks.consuming`'s, and calls `take` at least twice a second, with or without records.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog

from gpuledger.bus.protocol import Bus, TopicPartition
from gpuledger.clock import Clock, SystemClock
from gpuledger.codec import Decoder
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.http.client import open_http
from gpuledger.runtime.logs import Repeats
from gpuledger.settings.address import shown_url
from gpuledger.topics import ATTRIBUTED_INCIDENTS, EVENTS
from sinks.alerts.client import HEADERS, AlertmanagerClient
from sinks.alerts.engine import RuleEvaluator
from sinks.alerts.owed import Owed
from sinks.alerts.receivers import NAME, Checked, Receivers
from sinks.alerts.rules import rules_of
from sinks.alerts.settings import AlertsSettings
from sinks.alerts.slots import AlertSlots
from sinks.alerts.standing import Now
from sinks.consuming import consume
from sinks.credentials import watch_credentials
from sinks.metrics import count_dropped
from sinks.protocol import Batch, ConsumerConfig, Partitions, SinkContext
from sinks.timelines import TickOrder

GROUP: Final = "gpuledger-alerts"
_KEPT_NS: Final = (ATTRIBUTED_INCIDENTS.retention_ms or 0) * 1_000_000
_UNJUDGED: Final = {TickOrder.REPEATED: "duplicate", TickOrder.SUPERSEDED: "superseded"}
"""Why an event is not held against the rules, by where it stands."""
_PATIENCE_SECONDS: Final = 0.5
"""How long a poll waits for the answer to what the one before it brought."""
_MAX_OWED: Final = 2_000
"""So many alerts may wait for their first answer while polling goes on."""
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
    receiver = readiness.check("alerts.receiver", severity=CheckSeverity.WARNING)
    how = ConsumerConfig(
        group=group,
        member=member,
        decoders={
            EVENTS.name: Decoder(topic=EVENTS.name, record=GpuEvent),
            ATTRIBUTED_INCIDENTS.name: Decoder(
                topic=ATTRIBUTED_INCIDENTS.name, record=AttributedIncident
            ),
        },
        max_poll_records=settings.max_poll_records,
        receiver=", ".join(map(shown_url, settings.urls)),
    )
    gaps = readiness.check("alerts.gaps", severity=CheckSeverity.WARNING)
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
        self._watches: dict[int, RuleEvaluator] = {}
        self._slots = AlertSlots()
        self._repeats = Repeats()
        self._held: Partitions = frozenset()
        self._owed = Owed()
        self._receivers = Receivers(
            receivers,
            standing=lambda: [watch.alerts for watch in self._watches.values()],
            check=check,
            clock=clock,
            resend_ns=round(settings.resend_seconds * 1e9),
        )

    async def assign(self, partitions: Partitions, desk: SinkContext) -> None:  # noqa: ARG002  # a sink's method
        """Begin without any state: `for` begins anew."""
        self._held |= partitions

    async def prepare(self, desk: SinkContext) -> Partitions:  # noqa: ARG002  # a sink's method
        """Nothing has to come before."""
        return frozenset()

    async def take(self, batches: Sequence[Batch], desk: SinkContext) -> None:
        """Judge what was polled, and begin to tell what is due.

        Returns once all is told that has to be told before something is acknowledged, or soon
        where an Alertmanager answers and there is room: a slow one holds up no poll. Where none
        answers it waits.
        """
        owed_before = self._owed.count()
        for batch in batches:
            self._judge(batch, desk)
        self._forget()
        if self._owed.count() > owed_before:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._until(lambda: not self._owed.count())
        await self._until(self._has_room)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Report what is due, and acknowledge what is told, until it is so."""
        while True:
            self._receivers.begin()
            self._owed.settle()
            if is_so():
                return
            await self._receivers.change()

    def _has_room(self) -> bool:
        owed = self._owed.count()
        return not owed or (owed < _MAX_OWED and not self._receivers.are_away)

    async def release(self, partitions: Partitions, desk: SinkContext) -> None:  # noqa: ARG002  # a sink's method
        """Forget these without ending their alerts: the next owner goes on, or they end."""
        self._owed.settle()
        self._owed.drop(partitions)
        self._held -= partitions
        numbers = {partition.partition for partition in self._held}
        for number in [number for number in self._watches if number not in numbers]:
            self._watches.pop(number).alerts.drop_all()
        self._receivers.look_again()

    async def close(self) -> None:
        """End what is on its way to the Alertmanagers."""
        await self._receivers.close()

    def _judge(self, batch: Batch, desk: SinkContext) -> None:
        newest_ns: int | None = None
        watch, now = self._watch(batch.partition), Now.of(self._clock)
        for _, value in batch.items:
            if batch.partition.topic == EVENTS.name:
                newest_ns = value.time_ns
                if reason := _UNJUDGED.get(watch.judge(value, now=now)):
                    count_dropped(NAME, reason)
            else:
                self._take_incident(watch, value, now)
        self._count_left_out()
        self._owed.add(
            batch.partition,
            desk=desk,
            next_offset=batch.next_offset,
            time_ns=newest_ns,
            alerts=watch.alerts.not_awaited(),
        )

    def _watch(self, partition: TopicPartition) -> RuleEvaluator:
        # Equally numbered partitions of both topics come to the same consumer.
        if (watch := self._watches.get(partition.partition)) is None:
            watch = RuleEvaluator(rules=self._rules, slots=self._slots)
            self._watches[partition.partition] = watch
        return watch

    def _take_incident(self, watch: RuleEvaluator, taken: AttributedIncident, now: Now) -> None:
        """Alert of an incident, unless it is long past.

        One that is older than the topic keeps records has not waited there: its node's clock is
        wrong, as one in 1970, and when it happened is not known.
        """
        age_ns = watch.age_ns(taken, now=now)
        if self._settings.incident_age_seconds * 1e9 < age_ns <= _KEPT_NS:
            count_dropped(NAME, "too_old")
            return
        hold_ns = round(self._settings.incident_hold_seconds * 1e9)
        watch.take_incident(taken, hold_ns=hold_ns, now=now)

    def _count_left_out(self) -> None:
        """Count and tell of alerts that do not stand, as too many do."""
        left_out = self._slots.take_left_out()
        if not left_out.number:
            return
        count_dropped(NAME, "too_many", left_out.number)
        if count := self._repeats.count(NAME, more=left_out.number):
            _log.warning("alerts_dropped", node=left_out.node, count=count)

    def _forget(self) -> None:
        silent_ns = round(self._settings.stale_after_seconds * 1e9)
        for watch in self._watches.values():
            silent = watch.forget(now=Now.of(self._clock), silent_ns=silent_ns)
            if silent:
                _log.warning("silent_alerts_dropped", count=silent)


def _check_of(url: str, readiness: Readiness) -> Check:
    return readiness.check(f"alerts.alertmanager {shown_url(url)}", severity=CheckSeverity.WARNING)
