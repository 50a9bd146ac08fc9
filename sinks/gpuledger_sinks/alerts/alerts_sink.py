"""The alerts sink: reads events and incidents, and sends alerts to every Alertmanager.

`incident_alerts` decides which incidents are one alert, `receivers` sends alerts, and
`unacknowledged` decides when records are acknowledged. The consume loop (`gpuledger_sinks.loop`)
calls `handle` at least twice a second, with or without records.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final

import structlog
from typing_extensions import override

from gpuledger.bus.protocol import Bus, HistoryReader, Span, TopicPartition
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, Clock
from gpuledger.codec import Decoder
from gpuledger.errors import UndecodableError
from gpuledger.keys import split_key
from gpuledger.records import AttributedIncident
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.http.client import open_http
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.settings.secret import shown_url
from gpuledger.topics import Topics
from gpuledger_sinks.alerts.active_alerts import Now
from gpuledger_sinks.alerts.incident_words import IncidentWords
from gpuledger_sinks.alerts.partition_alerts import PartitionAlerts
from gpuledger_sinks.alerts.posted_alert import AlertPosting
from gpuledger_sinks.alerts.receivers import (
    HEADERS,
    NAME,
    AlertmanagerClient,
    CheckedClient,
    Receivers,
)
from gpuledger_sinks.alerts.slots import AlertSlots
from gpuledger_sinks.alerts.unacknowledged import Unacknowledged
from gpuledger_sinks.credentials import watch_credentials
from gpuledger_sinks.metrics import ALERTMANAGER_ANSWERS_TOTAL, ALERTMANAGER_STATUSES, count_dropped
from gpuledger_sinks.protocol import Batch, Partitions, Sink, SinkContext
from gpuledger_sinks.settings import AlertsSettings
from gpuledger_sinks.timelines import TickOrder

_NOT_OBSERVED: Final = {TickOrder.REPEATED: "duplicate", TickOrder.SUPERSEDED: "superseded"}
"""Reasons why an event is not checked against active alerts, by the order of its tick."""
_ANSWER_TIMEOUT_SECONDS: Final = 0.5
"""How long `handle` waits for the answers to the alerts of the records that it was given."""
_MAX_UNACKNOWLEDGED: Final = 2_000
"""Number of alerts without an answer at which no further records are accepted."""
_log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_sink(
    *,
    bus: Bus,
    settings: AlertsSettings,
    readiness: Readiness,
    clock: Clock,
    group: str,  # noqa: ARG001  # required by OpenSink
) -> AsyncIterator["AlertsSink"]:
    """Open the sink that reports incidents and the ends of states to the Alertmanagers.

    Raises `SettingsError` naming a file of credentials that cannot be used.
    """
    check = readiness.check("alerts.receiver", severity=CheckSeverity.WARNING)
    credentials = watch_credentials(settings, section=NAME, readiness=readiness)
    shown = [shown_url(url) for url in settings.urls]
    count_from_zero(ALERTMANAGER_ANSWERS_TOTAL, alertmanager=shown, status=ALERTMANAGER_STATUSES)
    async with (
        bus.reader() as history,
        open_http(
            headers={**settings.headers, **HEADERS}, timeout_seconds=settings.timeout_seconds
        ) as http,
    ):
        receivers = [
            CheckedClient(
                client=AlertmanagerClient(http=http, url=url, credentials=credentials),
                check=readiness.check(
                    f"alerts.alertmanager {shown_url(url)}", severity=CheckSeverity.WARNING
                ),
            )
            for url in settings.urls
        ]
        sink = AlertsSink(
            receivers=receivers,
            settings=settings,
            clock=clock,
            check=check,
            topics=bus.topics,
            history=history,
        )
        try:
            yield sink
        finally:
            await sink.close()


class AlertsSink(Sink):
    """Makes alerts from the incidents of each partition and sends them to every Alertmanager."""

    name = NAME

    def __init__(
        self,
        *,
        receivers: Sequence[CheckedClient],
        settings: AlertsSettings,
        clock: Clock,
        check: Check,
        topics: Topics,
        history: HistoryReader,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._events = topics.events.name
        self._incidents = topics.attributed_incidents.name
        self._history = history
        self._decoder = Decoder(topic=self._incidents, record=AttributedIncident)
        self._kept_ns = (topics.attributed_incidents.retention_ms or 0) * NS_PER_MS
        self.receiver = ", ".join(map(shown_url, settings.urls))
        self._words = IncidentWords(settings)
        self._parts: dict[int, PartitionAlerts] = {}
        self._held: Partitions = frozenset()
        self._unrestored: Partitions = frozenset()
        """Partitions of incidents whose states are not restored yet."""
        self._slots = AlertSlots()
        self._repeats = Repeats()
        self._unacknowledged = Unacknowledged()
        resend_ns = round(settings.resend_seconds * NS_PER_SECOND)
        self._receivers = Receivers(
            receivers,
            active=lambda: [part.alerts for part in self._parts.values()],
            check=check,
            clock=clock,
            resend_ns=resend_ns,
            posting=AlertPosting(settings, resend_ns=resend_ns),
        )

    @override
    async def assign(self, partitions: Partitions) -> None:
        """Record new partitions; `prepare` restores their states."""
        self._held |= partitions
        self._unrestored |= {at for at in partitions if at.topic == self._incidents}

    @override
    async def prepare(self, context: SinkContext) -> Partitions:
        """Restore the states of new partitions; return no partitions. Raises BusError."""
        for partition in sorted(self._unrestored):
            await self._restore_states(partition, context)
            self._unrestored -= {partition}
        return frozenset()

    async def _restore_states(self, partition: TopicPartition, context: SinkContext) -> None:
        """Restore states from the incidents before the committed offset in the topic."""
        next_offset = await context.consumer.committed(partition)
        if await context.consumer.report_moved(partition, read_before=None):
            # Committed by the loop, so that the partition's next owner does not report it again.
            context.acknowledge(partition, next_offset or 0)
        span = (await self._history.spans(partition.topic)).get(partition)
        if not next_offset or span is None:
            return
        before = Span(span.first, min(next_offset, span.end))
        # Closed at the end of the block instead of at garbage collection.
        async with aclosing(self._history.read(partition, before)) as chunks:
            async for records in chunks:
                if partition not in self._held:
                    return  # it was revoked meanwhile
                for record in records:
                    # The dead letter of an undecodable record was written when it was first read.
                    with suppress(UndecodableError):
                        attributed = self._decoder.decode(record.value)
                        part = self._part_of(partition)
                        part.restore_incident(attributed, now=Now.of(self._clock))

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Make alerts from polled records, and start sending the alerts that are due.

        Waits up to half a second for the answers that acknowledge these records. It then returns
        even without all answers, so that a slow Alertmanager does not delay polls. It waits longer
        only while no Alertmanager is available, or while `_MAX_UNACKNOWLEDGED` alerts or more wait
        for an answer.
        """
        unacknowledged_before = self._unacknowledged.count()
        for batch in batches:
            self._observe(batch, context)
        self._count_left_out()
        self._forget_unresponsive()
        if self._unacknowledged.count() > unacknowledged_before:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_TIMEOUT_SECONDS):
                    await self._until(lambda: not self._unacknowledged.count())

        def has_room() -> bool:
            # While no Alertmanager is available, further records could not be acknowledged.
            unacknowledged = self._unacknowledged.count()
            return not unacknowledged or (
                unacknowledged < _MAX_UNACKNOWLEDGED and not self._receivers.are_away
            )

        await self._until(has_room)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Send alerts that are due, and acknowledge answered records, until the condition holds."""
        while True:
            self._receivers.begin()
            self._unacknowledged.acknowledge_answered()
            if is_so():
                return
            await self._receivers.change()

    @override
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        """Forget partitions without ending their alerts, because the next owner continues them."""
        # Answers received so far can be acknowledged only while the partitions are assigned.
        self._unacknowledged.acknowledge_answered()
        self._unacknowledged.drop(partitions)
        self._held -= partitions
        self._unrestored -= partitions
        held = {partition.partition for partition in self._held}
        for partition in self._parts.keys() - held:
            self._parts.pop(partition).alerts.drop_all()
        self._receivers.wake()

    async def close(self) -> None:
        """End requests in flight to the Alertmanagers."""
        await self._receivers.close()

    def _observe(self, batch: Batch, context: SinkContext) -> None:
        newest_ns: int | None = None
        now = Now.of(self._clock)
        # Partitions of both topics with the same number are assigned to the same consumer.
        part = self._part_of(batch.partition)
        for _, value in batch.items:
            if batch.partition.topic == self._events:
                newest_ns = value.time_ns
                if reason := _NOT_OBSERVED.get(part.observe(value, now=now)):
                    count_dropped(NAME, reason)
            else:
                self._add_incident(part, value, now)
        self._unacknowledged.add(
            batch.partition,
            context=context,
            next_offset=batch.next_offset,
            time_ns=newest_ns,
            alerts=part.alerts.not_awaited(),
        )

    def _part_of(self, partition: TopicPartition) -> PartitionAlerts:
        """Return the alerts of a partition of events or of incidents.

        Two partitions with the same number share their alerts.
        """
        if (part := self._parts.get(partition.partition)) is None:
            part = self._parts[partition.partition] = PartitionAlerts(
                slots=self._slots,
                words=self._words,
                state_unresponsive_ns=round(
                    self._settings.state_stale_after_seconds * NS_PER_SECOND
                ),
            )
        return part

    def _add_incident(
        self, part: PartitionAlerts, attributed: AttributedIncident, now: Now
    ) -> None:
        """Make an alert of an incident, unless it is too old.

        An incident that is older than the topic's retention cannot have waited in the topic for so
        long. Its node's clock is wrong, for example in 1970, so its age is unknown and an alert is
        made.
        """
        age_ns = part.age_ns(attributed, now=now)
        if self._settings.incident_age_seconds * NS_PER_SECOND < age_ns <= self._kept_ns:
            # Its state may continue, or it may end a state that is active here.
            if not part.restore_incident(attributed, now=now):
                count_dropped(NAME, "too_old")
            return
        hold_ns = round(self._settings.incident_hold_seconds * NS_PER_SECOND)
        part.add_incident(attributed, hold_ns=hold_ns, now=now)

    def _count_left_out(self) -> None:
        """Count and log alerts that were left out, because too many are active."""
        left_out = self._slots.take_left_out()
        if not left_out.number:
            return
        count_dropped(NAME, "too_many", left_out.number)
        if count := self._repeats.count(NAME, more=left_out.number):
            cluster, node = split_key(left_out.node)
            _log.warning("alerts_dropped", cluster=cluster, node=node, count=count)

    def _forget_unresponsive(self) -> None:
        """Drop alerts of GPUs that no tick has named for a long time."""
        for part in self._parts.values():
            if unresponsive := part.forget(now=Now.of(self._clock)):
                # Alertmanagers end them after their last `endsAt`; the sink does not resolve them.
                _log.warning("unresponsive_alerts_dropped", count=unresponsive)
