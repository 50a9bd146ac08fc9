"""Laws of reading old records: spans, offsets by time, and reading without a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.protocol import Span, TopicPartition
from gpuledger.errors import TopicsError
from tests.bus_contract.harness import message, messages, read, reading, texts

if TYPE_CHECKING:
    from gpuledger.bus.protocol import HistoryReader, Record
    from tests.bus_contract.harness import Harness

_AT_MS = 1_790_000_000_000


async def read_span(reader: HistoryReader, partition: TopicPartition, span: Span) -> list[Record]:
    return [record async for some in reader.read(partition, span) for record in some]


class HistoryLaws:
    """Each test opens and closes its own clients."""

    async def test_a_topic_that_does_not_exist_has_no_span(self, harness: Harness) -> None:
        async with harness.bus.reader() as reader:
            with pytest.raises(TopicsError, match="absent"):
                await reader.spans("absent")

    async def test_kept_records_can_be_read_by_offset_any_number_of_times(
        self, harness: Harness
    ) -> None:
        partition = TopicPartition(harness.readings, 2)
        async with harness.bus.producer() as producer, harness.bus.reader() as reader:
            await producer.publish(*partition, messages("a", "b", "c", "d"))
            spans = await reader.spans(harness.readings)

            assert spans[partition] == Span(0, 4)
            assert spans[TopicPartition(harness.readings, 0)] == Span(0, 0)
            assert texts(await read_span(reader, partition, spans[partition])) == [
                "a",
                "b",
                "c",
                "d",
            ]
            assert texts(await read_span(reader, partition, Span(1, 3))) == ["b", "c"]
            assert await read_span(reader, partition, Span(2, 2)) == []

    async def test_partitions_are_read_one_after_another(self, harness: Harness) -> None:
        first, second = (TopicPartition(harness.readings, number) for number in (0, 1))
        async with harness.bus.producer() as producer, harness.bus.reader() as reader:
            await producer.publish(*first, messages("a"))
            await producer.publish(*second, messages("b"))

            assert texts(await read_span(reader, first, Span(0, 1))) == ["a"]
            assert texts(await read_span(reader, second, Span(0, 1))) == ["b"]

    async def test_every_record_before_the_offset_of_a_time_is_older_than_that_time(
        self, harness: Harness
    ) -> None:
        partition, empty = (TopicPartition(harness.readings, number) for number in (0, 1))
        seconds = [0, 1, 5, 2, 9]
        async with harness.bus.producer() as producer, harness.bus.reader() as reader:
            sent = [message(str(each), at_ms=_AT_MS + each * 1000) for each in seconds]
            for each in sent:
                await producer.publish(*partition, [each])

            async def at(second: float) -> int:
                requested = _AT_MS + int(second * 1000)
                return (await reader.offsets_at([partition, empty], requested))[partition]

            assert [await at(second) for second in (-1, 0, 0.5, 2, 3, 9)] == [0, 0, 1, 2, 2, 4]
            assert await at(9.001) == 5
            assert await reader.offsets_at([empty], _AT_MS) == {empty: 0}

    async def test_reading_old_records_does_not_move_any_group(self, harness: Harness) -> None:
        partition = TopicPartition(harness.readings, 0)
        async with harness.bus.producer() as producer, harness.bus.reader() as reader:
            await producer.publish(*partition, messages("a", "b"))
            await read_span(reader, partition, Span(0, 2))
            async with harness.bus.consumer(reading(harness)) as consumer:
                assert texts(await read(2, consumer)) == ["a", "b"]

    async def test_reading_skips_offsets_that_compaction_removed(self, harness: Harness) -> None:
        partition = TopicPartition(harness.states, 0)
        async with harness.bus.producer() as producer, harness.bus.reader() as reader:
            await producer.publish(*partition, [message(text, key="k") for text in "abc"])
            await harness.compact(last=message("last", key="l", at_ms=_AT_MS + 10_000))
            span = (await reader.spans(harness.states))[partition]

            assert texts(await read_span(reader, partition, span))[-2:] == ["c", "last"]
