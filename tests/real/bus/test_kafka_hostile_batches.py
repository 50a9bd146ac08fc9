"""Batches that cannot be unpacked: every reader of the Kafka bus continues at the next batch."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import aiokafka
import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Span, Subscription, TopicPartition
from gpuledger.records import PodRecord
from gpuledger.topics import Topic
from tests.bus_contract.harness import poll_until
from tests.raw_batches import Raw
from tests.real.bus.builders import numbered, settings_of
from tests.real.hostile_batches import HOSTILE, LEGAL, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuledger.bus.protocol import Record
    from tests.real.services.kafka import Kafka

Shown = int | tuple[int, int]


class Scene:
    """A topic with numbered records, and batches between them that cannot be unpacked."""

    def __init__(self, kafka: Kafka) -> None:
        self.topic = f"hostile-{uuid4().hex[:8]}"
        self.bus = KafkaBus(settings_of(kafka.bootstrap_servers))
        self._kafka = kafka
        self.written: list[Shown] = []
        """The offset of each record; for each unreadable batch its first and last offset."""

    @property
    def partition(self) -> TopicPartition:
        return TopicPartition(self.topic, 0)

    async def fill(self) -> None:
        table = [Topic(name=self.topic, record=PodRecord, key="uid", partitions=1)]
        await create_topics(settings_of(self._kafka.bootstrap_servers), table)
        async with self.bus.producer() as producer:
            for name, how in {**HOSTILE, **LEGAL}.items():
                await producer.publish(self.topic, 0, [numbered(0), numbered(1)])
                first = self._next()
                self.written += [first, first + 1]
                raw = [Raw(b"k", b"%d" % number) for number in range(3)]
                at = aiokafka.TopicPartition(*self.partition)
                first, last = await write(self._kafka, at, how, raw)
                self.written += [(first, last)] if name in HOSTILE else range(first, last + 1)
            await producer.publish(self.topic, 0, [numbered(2)])
            self.written.append(self._next())

    def _next(self) -> int:
        last = self.written[-1] if self.written else -1
        return (last if isinstance(last, int) else last[1]) + 1


def shown(records: Sequence[Record]) -> list[Shown]:
    return [
        (record.first_offset, record.offset) if record.unreadable else record.offset
        for record in records
    ]


@pytest.fixture
async def scene(kafka: Kafka) -> Scene:
    made = Scene(kafka)
    await made.fill()
    return made


async def read(scene: Scene, span: Span) -> list[Shown]:
    found: list[Shown] = []
    async with scene.bus.reader() as reader:
        async for records in reader.read(scene.partition, span):
            found += shown(records)
    return found


async def test_a_reader_skips_batches_that_cannot_be_unpacked(scene: Scene) -> None:
    async with scene.bus.reader() as reader:
        span = (await reader.spans(scene.topic))[scene.partition]

    assert await read(scene, span) == scene.written


async def test_a_span_that_ends_in_such_a_batch_reports_it(scene: Scene) -> None:
    """The batch begins in the span; no other span would report this part."""
    for partition, shown_batch in enumerate(scene.written):
        if isinstance(shown_batch, tuple):
            before, (first, last) = scene.written[partition - 1], shown_batch
            assert await read(scene, Span(first - 1, first + 1)) == [before, (first, last)]
            rest = [(first + 1, last)] if first < last else []
            assert await read(scene, Span(first + 1, last + 2)) == [*rest, last + 1]


async def test_a_group_continues_behind_such_batches_wherever_it_was_interrupted(
    scene: Scene,
) -> None:
    """Each record is read by a new member, which commits it and leaves."""
    group = f"group-{scene.topic}"
    found: list[Shown] = []
    for _ in range(12):
        subscription = Subscription(group=group, topics=[scene.topic])
        async with scene.bus.consumer(subscription) as consumer:
            (record,) = await poll_until(bool, consumer, max_records=1)
            assert await consumer.position(scene.partition) == record.offset + 1
            await consumer.commit({scene.partition: record.offset + 1})
            found += shown([record])

    assert found == scene.written[:12]
