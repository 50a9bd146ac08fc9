"""Write what is made of refused events to a topic, as the sink that writes to Kafka does.

Not in its transactions: to open one would shut the running sink out. So a batch of which no answer
comes is written twice, which readers tell by the identity that each message has.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from typing_extensions import override

from gpuledger.bus.protocol import Bus, Message, Producer
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger_sinks.kafka_messages import UnfitError, ValuesOf, messages_of
from gpuledger_sinks.kafka_sink import KafkaSinkSettings
from gpuledger_sinks.redelivery import Redelivery, Refusals, RefusedEvent


@asynccontextmanager
async def open_kafka_redelivery(
    *, bus: Bus, settings: KafkaSinkSettings, values_of: ValuesOf, clock: Clock
) -> AsyncIterator["KafkaRedelivery"]:
    """Open the redelivery to a topic; raises TopicsError where there is none."""
    partitions = await bus.partitions(settings.topic)
    async with bus.producer() as producer:
        yield KafkaRedelivery(
            producer=producer,
            settings=settings,
            values_of=values_of,
            partitions=partitions,
            clock=clock,
        )


class KafkaRedelivery(Redelivery):
    """Writes one event at a time: what is made of it may be larger than a batch."""

    max_batch = 1

    def __init__(
        self,
        *,
        producer: Producer,
        settings: KafkaSinkSettings,
        values_of: ValuesOf,
        partitions: int,
        clock: Clock,
    ) -> None:
        self.receiver = f"topic {settings.topic}"
        self._producer, self._settings, self._values_of = producer, settings, values_of
        self._partitions, self._clock = partitions, clock

    @override
    async def deliver(self, batch: Sequence[RefusedEvent]) -> Refusals:
        """Write the messages of each event to the partition in which its sink would."""
        return [await self._write(each) for each in batch]

    async def _write(self, refused: RefusedEvent) -> str | None:
        try:
            messages = self._messages_of(refused)
        except UnfitError as error:
            return f"{error.reason}: {error}"
        if messages:
            partition = refused.record.partition % self._partitions
            await self._producer.publish(self._settings.topic, partition, messages)
        return None

    def _messages_of(self, refused: RefusedEvent) -> list[Message]:
        ahead_ns = round(self._settings.max_future_seconds * NS_PER_SECOND)
        return messages_of(
            refused.event,
            values_of=self._values_of,
            topic=self._settings.topic,
            newest_ns=self._clock.time_ns() + ahead_ns,
        )
