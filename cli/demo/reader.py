"""Reads the run's events, incidents and dead letters off the bus, for its tally and alerts."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from cli.demo.alerts import RunAlerts
from cli.demo.joining import own_group
from cli.demo.run_bus import Offsets
from cli.demo.totals import Tally
from gpuledger.bus.protocol import Consumer, Record, Subscription, TopicPartition
from gpuledger.codec import Decoder
from gpuledger.errors import BusError, NotAssignedError, UndecodableError
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger.runtime import Backoff
from gpuledger.topics import ATTRIBUTED_INCIDENTS, DEAD_LETTERS, EVENTS, SAMPLES

_EVENT: Final = Decoder(topic=EVENTS.name, record=GpuEvent)
_INCIDENT: Final = Decoder(topic=ATTRIBUTED_INCIDENTS.name, record=AttributedIncident)
_TOPICS: Final = (EVENTS.name, ATTRIBUTED_INCIDENTS.name, DEAD_LETTERS.name)
_MAX_NEWEST: Final = 10_000


def subscription() -> Subscription:
    """Return the subscription of the reader."""
    return Subscription(group=own_group("gpuledger-reader"), topics=_TOPICS)


class EventReader:
    """Follows the events of a run; its consumer gives each of them once."""

    def __init__(
        self,
        *,
        consumer: Consumer,
        tally: Tally,
        alerts: RunAlerts,
        beginning: Offsets,
        nodes: set[str],
    ) -> None:
        self._consumer = consumer
        self._tally = tally
        self._alerts = alerts
        self._nodes = nodes
        self._begun = {at: end for at, end in beginning.items() if at.topic == SAMPLES.name}
        self.dead_letters = 0
        self.newest: deque[tuple[TopicPartition, int]] = deque(maxlen=_MAX_NEWEST)
        """Where the records that were read last stand: what the sinks should have too."""

    async def follow(self) -> None:
        """Hand events to the tally, for ever; brokers and topics that are away are waited for."""
        backoff = Backoff(first_seconds=0.2, max_seconds=5.0)
        while True:
            try:
                batch = await self._consumer.poll(timeout_seconds=0.5, max_records=500)
            except BusError:
                await asyncio.sleep(backoff.next_seconds())
                continue
            backoff.reset()
            for place, records in batch.items():
                self.newest.extend((place, record.offset) for record in records)
                self._take(records)

    async def count_ticks(self) -> int:
        """Return how many ticks have been published since the run began."""
        ends = await self._consumer.end_offsets(self._begun)
        return sum(end - self._begun[place] for place, end in ends.items())

    async def has_read_all(self) -> bool:
        """Return whether nothing is left to read now: an incident may come behind its event."""
        try:
            ends = await self._consumer.end_offsets(self._consumer.assignment())
            at = {place: await self._consumer.position(place) for place in ends}
        except NotAssignedError:
            return False
        return all(at[place] >= end for place, end in ends.items())

    def _take(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.topic == DEAD_LETTERS.name:
                self.dead_letters += 1
                continue
            try:
                if record.topic == EVENTS.name:
                    self._take_event(_EVENT.decode(record.value))
                else:
                    self._take_incident(_INCIDENT.decode(record.value))
            except UndecodableError:
                continue  # the sinks put it aside, and it comes back here as a dead letter

    def _take_event(self, event: GpuEvent) -> None:
        if event.node in self._nodes:
            self._tally.add(event)
            self._alerts.add(event)

    def _take_incident(self, taken: AttributedIncident) -> None:
        if taken.incident.node in self._nodes:
            self._tally.presence.add_incident(taken)
            self._alerts.add_incident(taken)
