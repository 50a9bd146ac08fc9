"""Reads the events of a run for its totals and alerts."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from gpuledger.bus.protocol import Consumer, Record, Subscription, TopicPartition
from gpuledger.codec import Decoder
from gpuledger.errors import BusError, NotAssignedError, UndecodableError
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger.runtime import Backoff
from gpuledger.topics import Topics
from gpuledger_cli.demo.totals import RunAlerts, Tally

_MAX_NEWEST: Final = 10_000


def subscription(topics: Topics) -> Subscription:
    """Return the subscription of the reader."""
    read = (topics.events, topics.attributed_incidents, topics.dead_letters)
    group = topics.group("gpuledger-reader")
    return Subscription(group=group, topics=tuple(topic.name for topic in read))


class EventReader:
    """Follows the events of a run, and counts each once even if its group rebalances."""

    def __init__(
        self,
        *,
        consumer: Consumer,
        tally: Tally,
        alerts: RunAlerts,
        topics: Topics,
    ) -> None:
        self._topics = topics
        self._event_decoder = Decoder(topic=topics.events.name, record=GpuEvent)
        self._incident_decoder = Decoder(
            topic=topics.attributed_incidents.name, record=AttributedIncident
        )
        self._consumer = consumer
        self._tally = tally
        self._alerts = alerts
        self._next: dict[TopicPartition, int] = {}
        self.dead_letters = 0
        self.newest: deque[tuple[TopicPartition, int]] = deque(maxlen=_MAX_NEWEST)
        """Positions of the last records read, which the sinks should have delivered too."""

    async def follow(self) -> None:
        """Pass events to the tally until cancelled; wait for unavailable brokers and topics."""
        backoff = Backoff(first_seconds=0.2, max_seconds=5.0)
        while True:
            try:
                batch = await self._consumer.poll(timeout_seconds=0.5, max_records=500)
            except BusError:
                await asyncio.sleep(backoff.next_seconds())
                continue
            backoff.reset()
            for partition, records in batch.items():
                first = self._next.get(partition, 0)
                new = [record for record in records if record.offset >= first]
                self._next[partition] = max(first, records[-1].offset + 1)
                self.newest.extend((partition, record.offset) for record in new)
                self._take(new)

    async def has_read_all(self) -> bool:
        """Return whether all records in the topics are read, including late incidents."""
        try:
            ends = await self._consumer.end_offsets(self._consumer.assignment())
            at = {partition: await self._consumer.position(partition) for partition in ends}
        except NotAssignedError:
            return False
        return all(at[partition] >= end for partition, end in ends.items())

    def _take(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.topic == self._topics.dead_letters.name:
                self.dead_letters += 1
                continue
            try:
                if record.topic == self._topics.events.name:
                    event = self._event_decoder.decode(record.value)
                    self._tally.add(event)
                    self._alerts.add(event)
                else:
                    attributed = self._incident_decoder.decode(record.value)
                    self._tally.gpu_tracker.add_incident(attributed)
                    self._alerts.add_incident(attributed)
            except UndecodableError:
                continue  # the sinks reject it, and it arrives here as a dead letter
