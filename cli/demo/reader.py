"""Reads the run's events, incidents and dead letters off the bus, for its tally and alerts.

One consumer group of its own for each run, so that a demo beside another one sees everything; on
a broker that holds older events it begins at the end.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from cli.demo.alerts import RunAlerts
from cli.demo.groups import own_group
from cli.demo.tally import Tally
from gpuledger.bus.protocol import Consumer, Record, Subscription, TopicPartition
from gpuledger.codec import Decoder
from gpuledger.errors import BusUnavailableError, UndecodableError
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger.service import Backoff
from gpuledger.topics import ATTRIBUTED_INCIDENTS, DEAD_LETTERS, EVENTS, SAMPLES

_EVENT: Final = Decoder(topic=EVENTS.name, record=GpuEvent)
_INCIDENT: Final = Decoder(topic=ATTRIBUTED_INCIDENTS.name, record=AttributedIncident)
_TOPICS: Final = (EVENTS.name, ATTRIBUTED_INCIDENTS.name, DEAD_LETTERS.name)


def subscription() -> Subscription:
    """Give the subscription of one run."""
    return Subscription(group=own_group(uuid.uuid4().hex[:8]), topics=_TOPICS)


class EventReader:
    """Follows the events of a run that begins when `begin` returns."""

    def __init__(
        self,
        *,
        consumer: Consumer,
        tally: Tally,
        alerts: RunAlerts,
        partitions: int,
        nodes: set[str],
    ) -> None:
        self._consumer = consumer
        self._tally = tally
        self._alerts = alerts
        self._nodes = nodes
        self._samples = [TopicPartition(SAMPLES.name, number) for number in range(partitions)]
        self._begun: Mapping[TopicPartition, int] = {}
        self.dead_letters = 0

    async def begin(self) -> None:
        """Wait for the partitions and go to their ends."""
        while not self._consumer.assignment():
            await self._consumer.poll(timeout_seconds=0.1, max_records=1)
        held = self._consumer.assignment()
        for place, end in (await self._consumer.end_offsets(held)).items():
            await self._consumer.seek(place, end)
        self._begun = await self._consumer.end_offsets(self._samples)

    async def follow(self) -> None:
        """Hand events to the tally, for ever; a broker that is away is waited for."""
        backoff = Backoff(first_seconds=0.2, most_seconds=5.0)
        while True:
            try:
                batch = await self._consumer.poll(timeout_seconds=0.5, max_records=500)
            except BusUnavailableError:
                await asyncio.sleep(backoff.next_seconds())
                continue
            backoff.reset()
            for records in batch.values():
                self._take(records)

    async def count_ticks(self) -> int:
        """Give how many ticks have been published since the run began."""
        ends = await self._consumer.end_offsets(self._samples)
        return sum(end - self._begun[place] for place, end in ends.items())

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
