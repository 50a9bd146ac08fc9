"""No batch can crash or block its reader: an unreadable batch is skipped exactly and reported."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard
from aiokafka.consumer.fetcher import READ_COMMITTED
from aiokafka.consumer.subscription_state import Assignment
from aiokafka.record.memory_records import MemoryRecords

from gpuledger.bus.aiokafka_patches.unpacking import (
    PartitionAnswer,
    PartitionBatches,
    install_unpacking,
)
from gpuledger.bus.kafka_fetch import named
from gpuledger.bus.limits import (
    MAX_BATCH_BYTES,
    MAX_BATCH_RECORDS,
    MAX_RECORD_HEADERS,
    MAX_TURN_BYTES,
    MAX_UNPACKED_BYTES,
    TOPIC_MESSAGE_BYTES,
)
from gpuledger.bus.protocol import Record, TopicPartition, UnreadableReason
from tests import raw_batches
from tests.raw_batches import GZIP, LZ4, NONE, SNAPPY, ZSTD, Raw
from tests.real.hostile_batches import max_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

AT = TopicPartition("a.topic", 3)
TIME_MS = 1_700_000_000_000
DAMAGED, CODEC = UnreadableReason.DAMAGED, UnreadableReason.CODEC
TOO_LARGE, TOO_MANY = UnreadableReason.TOO_LARGE, UnreadableReason.TOO_MANY


@pytest.fixture(autouse=True)
def _reading_any_batch() -> None:
    install_unpacking()


def values(first: int, count: int = 3) -> list[Raw]:
    return [Raw(b"k", b"%d" % number) for number in range(first, first + count)]


def batch(records: list[Raw], *, at: int, codec: int = ZSTD) -> bytes:
    packed = raw_batches.pack(raw_batches.body(records), codec)
    return of(packed, at=at, codec=codec, count=len(records))


def claiming(*deltas: int, codec: int = NONE) -> bytes:
    """Return a batch at 3 whose three records claim these offset deltas."""
    return of(
        raw_batches.pack(raw_batches.body(values(3), deltas=deltas), codec), at=3, codec=codec
    )


def of(packed: bytes, *, at: int, codec: int = ZSTD, count: int = 3) -> bytes:
    return raw_batches.batch(packed, count=count, codec=codec, time_ms=TIME_MS, base_offset=at)


def answer(data: bytes, *, position: int = 0) -> PartitionBatches:
    return PartitionBatches(
        AT,
        MemoryRecords(data),
        aborted_transactions=[],
        fetch_offset=position,
        key_deserializer=None,
        value_deserializer=None,
        check_crcs=True,
        isolation_level=READ_COMMITTED,
    )


def fetched(parts: list[tuple[int, bytes]]) -> list[Record]:
    """Return all records, fetching until none is left; each batch is given with its offset."""
    records: list[Record] = []
    position = 0
    while left := b"".join(data for at, data in parts if at >= position):
        found = answer(left, position=position)
        records += found
        position = found.next_fetch_offset
    return records


def shown(records: list[Record]) -> list[object]:
    """Return the values; for an unreadable batch, its offsets and the reason."""
    return [
        int(each.value or b"")
        if each.unreadable is None
        else (each.unreadable.first_offset, each.offset, each.unreadable.reason)
        for each in records
    ]


BODY = raw_batches.body(values(3))
PACKED = raw_batches.pack(BODY, ZSTD)
NOT_UTF_8 = raw_batches.body([*values(3, 1), Raw(b"k", b"4", [(b"\xff\xfe", b"")]), *values(5, 1)])
HOSTILE = {
    "a header's name that is not UTF-8": (of(NOT_UTF_8, at=3, codec=NONE), [3], 4, DAMAGED),
    "the same, compressed": (of(raw_batches.pack(NOT_UTF_8, ZSTD), at=3), [3], 4, DAMAGED),
    "no zstd": (of(b"no frame of zstd", at=3), [], 3, DAMAGED),
    "nothing": (of(b"", at=3), [], 3, DAMAGED),
    "a truncated frame": (of(PACKED[:-4], at=3), [3, 4], 5, DAMAGED),
    "an invalid second frame": (of(PACKED + b"junk", at=3), [], 3, DAMAGED),
    "only a skippable frame": (of(raw_batches.skipped_frame(b"x" * 99), at=3), [], 3, DAMAGED),
    "truncated records": (of(BODY[:-4], at=3, codec=NONE), [3, 4], 5, DAMAGED),
    "bytes after the records": (of(BODY + b"junk", at=3, codec=NONE), [3, 4], 5, DAMAGED),
    "a record right after its batch": (claiming(0, 1, 3), [3, 4], 5, DAMAGED),
    "a record far after its batch": (claiming(0, 10**6, 2), [3], 4, DAMAGED),
    "only records after their batch": (claiming(3, 4, 5), [], 3, DAMAGED),
    "a record after its batch, compressed": (claiming(0, 1, 7, codec=ZSTD), [3, 4], 5, DAMAGED),
    "a record before its batch": (claiming(0, -1, 2), [3], 4, DAMAGED),
    "a record far before its batch": (claiming(-(2**40), 1, 2), [], 3, DAMAGED),
    "two records with one offset": (claiming(0, 0, 2), [3], 4, DAMAGED),
    "records in another order": (claiming(0, 2, 1), [3], 4, DAMAGED),
    "two records with the last offset": (claiming(0, 2, 2), [3], 4, DAMAGED),
    "gzip": (batch(values(3), at=3, codec=GZIP), [], 3, CODEC),
    "invalid gzip": (of(b"\x1f\x8b", at=3, codec=GZIP), [], 3, CODEC),
    "snappy": (batch(values(3), at=3, codec=SNAPPY), [], 3, CODEC),
    "lz4": (batch(values(3), at=3, codec=LZ4), [], 3, CODEC),
    "an unknown codec": (of(BODY, at=3, codec=6), [], 3, CODEC),
    "a bomb that declares its size": (
        of(raw_batches.bomb(MAX_UNPACKED_BYTES), at=3),
        [],
        3,
        TOO_LARGE,
    ),
    "a bomb": (
        of(raw_batches.bomb(MAX_UNPACKED_BYTES, declares_size=False), at=3),
        [],
        3,
        TOO_LARGE,
    ),
    "a bomb after a frame": (
        of(PACKED + raw_batches.bomb(MAX_UNPACKED_BYTES), at=3),
        [],
        3,
        TOO_LARGE,
    ),
}


@pytest.mark.parametrize(("between", "before", "first", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_an_unreadable_batch_is_one_record_of_its_offsets_and_leaves_others_intact(
    between: bytes, before: list[int], first: int, reason: UnreadableReason
) -> None:
    parts = [(0, batch(values(0), at=0)), (3, between), (6, batch(values(6), at=6))]

    assert shown(fetched(parts)) == [0, 1, 2, *before, (first, 5, reason), 6, 7, 8]


@pytest.mark.parametrize(("between", "before", "first", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_the_position_after_each_record_is_exact(
    between: bytes, before: list[int], first: int, reason: UnreadableReason
) -> None:
    del before, first, reason
    found = answer(batch(values(0), at=0) + between + batch(values(6), at=6))

    for record in found:
        assert found.next_fetch_offset == record.offset + 1


BOMB_BYTES = 128 * 2**20
_CLAIMED = b"\xff\xff\xff\xff\x0f"
"""4 GiB, as the size in the head of a snappy block."""
BOMBS = {
    "gzip": (GZIP, lambda: raw_batches.pack(bytes(BOMB_BYTES), GZIP), CODEC),
    "snappy": (SNAPPY, lambda: _CLAIMED + raw_batches.pack(bytes(2**20), SNAPPY), CODEC),
    "lz4": (LZ4, lambda: raw_batches.pack(bytes(BOMB_BYTES), LZ4), CODEC),
    "zstd": (ZSTD, lambda: raw_batches.bomb(BOMB_BYTES), TOO_LARGE),
    "zstd without a size": (
        ZSTD,
        lambda: raw_batches.bomb(BOMB_BYTES, declares_size=False),
        TOO_LARGE,
    ),
}
"""Batches of at most 1 MiB that would take at least 128 MiB, by codec of Kafka."""


@pytest.mark.parametrize(("codec", "made", "reason"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_of_any_codec_is_one_unreadable_record_and_takes_no_memory(
    codec: int, made: Callable[[], bytes], reason: UnreadableReason
) -> None:
    packed = made()
    assert len(packed) <= TOPIC_MESSAGE_BYTES
    parts = [(0, batch(values(0), at=0)), (3, of(packed, at=3, codec=codec))]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = max_memory_bytes(os.getpid())

    assert shown(fetched(parts)) == [0, 1, 2, (3, 5, reason)]
    assert max_memory_bytes(os.getpid()) - before < BOMB_BYTES / 4


def test_a_batch_with_more_records_than_ours_ever_have_is_reported_as_one_record() -> None:
    """Each of them would be a dead letter, and a batch of 727 kB holds 900,000."""
    count = MAX_BATCH_RECORDS + 1
    parts = [(0, batch([Raw(None, None)] * count, at=0)), (count, batch(values(0), at=count))]
    (much, *after) = fetched(parts)

    assert shown([much]) == [(0, count - 1, TOO_MANY)]
    assert [record.offset for record in after] == [count, count + 1, count + 2]


def test_a_batch_with_the_maximum_number_of_records_is_read() -> None:
    found = fetched([(0, batch([Raw(b"k", b"")] * MAX_BATCH_RECORDS, at=0))])

    assert len(found) == MAX_BATCH_RECORDS
    assert not any(record.unreadable for record in found)


def test_the_placeholder_of_a_batch_has_no_key_and_no_value_but_the_time_of_the_batch() -> None:
    (record,) = list(answer(of(b"no frame", at=0)))

    assert (record.topic, record.partition, record.key, record.value) == (*AT, None, None)
    assert record.timestamp_ms == TIME_MS


def test_a_reader_that_starts_within_an_unreadable_batch_gets_only_its_remaining_offsets() -> None:
    (record,) = list(answer(of(NOT_UTF_8, at=3, codec=NONE), position=5))

    assert shown([record]) == [(5, 5, DAMAGED)]


def test_an_unreadable_batch_after_the_position_is_reported_from_its_first_offset() -> None:
    (record,) = list(answer(of(b"no frame", at=90), position=7))

    assert shown([record]) == [(90, 92, DAMAGED)]


@pytest.mark.parametrize(
    "packed",
    [
        raw_batches.two_frames(BODY),
        raw_batches.skipped_frame(b"x") + PACKED,
        PACKED + raw_batches.skipped_frame(b"x"),
        raw_batches.skipped_frame(b"") + PACKED,
    ],
)
def test_several_frames_of_one_batch_are_decompressed_as_one(packed: bytes) -> None:
    assert shown(list(answer(of(packed, at=3)))) == [3, 4, 5]


def test_a_batch_of_the_maximum_size_is_read() -> None:
    size = MAX_UNPACKED_BYTES - 100
    for declares_size in (True, False):
        packed = raw_batches.bomb(size, declares_size=declares_size)
        (record,) = list(answer(of(packed, at=0, count=1)))
        assert record.value == bytes(size)


BIG = Raw(None, bytes(MAX_TURN_BYTES // 2 + 1))


def drained(
    *answers: PartitionBatches,
) -> tuple[Callable[[int], list[list[int]]], Callable[[], list[int]]]:
    """Return a function that polls the answers as aiokafka's fetcher does, and one of positions."""
    partitions = [named(TopicPartition("a.topic", number)) for number in range(len(answers))]
    assignment = Assignment(partitions)
    results = []
    for partition, each in zip(partitions, answers, strict=True):
        assignment.state_value(partition).seek(each.next_fetch_offset)
        results.append(
            PartitionAnswer(partition, assignment=assignment, partition_records=each, backoff=0)
        )

    def poll(most: int) -> list[list[int]]:
        return [
            [record.offset for record in result.getall(most)] if result.has_more() else []
            for result in results
        ]

    def positions() -> list[int]:
        return [assignment.state_value(partition).position for partition in partitions]

    return poll, positions


async def test_a_turn_of_the_loop_takes_a_bounded_number_of_bytes_plus_one_batch() -> None:
    """Other tasks on the loop get their turn; the remaining records stay queued."""
    data = b"".join(batch([BIG], at=at) for at in range(3))
    poll, positions = drained(answer(data), answer(data))

    assert poll(500) == [[0, 1], []]
    assert poll(500) == [[], []], "in the same turn"
    await asyncio.sleep(0)
    assert poll(500) == [[2], [0]]
    await asyncio.sleep(0)
    assert poll(500) == [[], [1, 2]]
    assert positions() == [3, 3]


async def test_uncompressed_batches_count_towards_the_same_limit() -> None:
    data = batch([BIG, BIG], at=0, codec=NONE)
    poll, _ = drained(answer(data), answer(data))

    assert poll(500) == [[], []]
    await asyncio.sleep(0)
    assert poll(500) == [[0, 1], []]
    await asyncio.sleep(0)
    assert poll(500) == [[], [0, 1]]


async def test_headers_count_towards_the_limit_although_they_are_not_returned() -> None:
    headed = [Raw(None, b"", [(b"", bytes(1 << 20))] * 7)]
    poll, _ = drained(answer(b"".join(batch(headed, at=at) for at in range(3))))

    assert poll(500) == [[0]]


async def test_a_bomb_that_must_be_decompressed_to_be_recognized_counts_towards_the_limit() -> None:
    bomb = raw_batches.bomb(MAX_UNPACKED_BYTES, declares_size=False)
    poll, _ = drained(answer(b"".join(of(bomb, at=at, count=1) for at in range(3))))

    assert poll(500) == [[0]]


async def test_a_bomb_that_declares_its_size_costs_nothing() -> None:
    bomb = raw_batches.bomb(MAX_UNPACKED_BYTES)
    poll, _ = drained(answer(b"".join(of(bomb, at=at, count=1) for at in range(4))))

    assert poll(500) == [[0, 1, 2, 3]]


async def test_polls_in_one_turn_return_all_records_of_a_batch_that_was_started() -> None:
    poll, positions = drained(answer(batch([BIG, BIG, BIG], at=0) + batch(values(3), at=3)))

    assert [poll(1) for _ in range(4)] == [[[0]], [[1]], [[2]], [[]]]
    assert positions() == [3]


def headed(*counts: int, codec: int = ZSTD) -> bytes:
    """Return a batch of records with these numbers of empty headers."""
    return batch([Raw(b"k", b"0", [(b"", b"")] * count) for count in counts], at=0, codec=codec)


@pytest.mark.parametrize("codec", [NONE, ZSTD])
def test_a_record_with_too_many_headers_is_skipped_with_the_rest_of_its_batch(
    codec: int,
) -> None:

    assert shown(
        list(
            answer(headed(MAX_RECORD_HEADERS, MAX_RECORD_HEADERS, MAX_RECORD_HEADERS, codec=codec))
        )
    ) == [0, 0, 0]
    found = shown(list(answer(headed(0, MAX_RECORD_HEADERS + 1, 0, codec=codec))))
    assert found == [0, (1, 2, TOO_MANY)]


def test_headers_of_a_compressed_batch_are_not_read_if_it_has_room_for_too_many() -> None:
    """A batch of 342 bytes with 4,000,000 headers blocked the loop for a second."""
    records = raw_batches.body(values(0, 1)) + raw_batches.empty_headers(MAX_BATCH_BYTES // 2, at=1)
    data = of(raw_batches.pack(records, ZSTD), at=0, count=2)
    (record,) = list(answer(data + batch(values(2, 0), at=2)))

    assert shown([record]) == [(0, 1, TOO_MANY)]


def test_polls_that_take_a_few_records_each_return_all_of_them() -> None:
    found = answer(batch(values(0), at=0) + batch(values(3), at=3))

    assert [taken(found, 2) for _ in range(4)] == [[0, 1], [2, 3], [4, 5], []]


def taken(found: PartitionBatches, most: int) -> list[object]:
    """Take some records, as a poll does."""
    records: list[Record] = []
    for record in found:
        records.append(record)
        if len(records) == most:
            break
    return shown(records)


def test_a_batch_with_a_wrong_checksum_is_fetched_again_before_it_is_skipped() -> None:
    good, spoiled = batch(values(0), at=0), spoil(batch(values(3), at=3))
    data = bytes(good + spoiled + batch(values(6), at=6))

    seen = []
    position = 0
    for _ in range(3):
        found = answer(data, position=position)
        seen.append(shown(list(found)))
        position = found.next_fetch_offset

    assert seen == [[0, 1, 2], [], [(3, 5, DAMAGED), 6, 7, 8]]


def test_a_correct_checksum_restarts_the_count() -> None:
    whole = batch(values(90), at=90)
    fetches = [spoil(whole), spoil(whole), whole] * 2 + [spoil(whole)] * 3

    seen = [shown(list(answer(data, position=90))) for data in fetches]
    read = [[], [], [90, 91, 92]]
    assert seen == [*read, *read, [], [], [(90, 92, DAMAGED)]]


def spoil(data: bytes) -> bytes:
    """Return a batch that was damaged on its way."""
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_frame_with_a_window_larger_than_a_batch_may_be_is_refused() -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    packed = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    data = packed.compress(BODY) + packed.flush()

    assert shown(list(answer(of(data, at=3)))) == [(3, 5, DAMAGED)]
