"""Partitions are processed concurrently, except for large batches."""

import asyncio

import pytest

from gpuledger.bus.protocol import Record, TopicPartition
from gpuledger_sinks.protocol import LARGE_BYTES, Batch, LargeTurns
from tests.hanging import HANG_SECONDS


def batch(number: int, *, size_bytes: int) -> Batch:
    record = Record("t", number, 0, 1, b"k", b"x" * size_bytes)
    small = Record("t", number, 1, 1, b"k", b"x")
    items = [(record, None), (small, None)]
    return Batch(partition=TopicPartition("t", number), items=items, next_offset=2)


@pytest.mark.parametrize(("size_bytes", "at_once"), [(LARGE_BYTES, 4), (LARGE_BYTES + 1, 1)])
async def test_only_one_partition_at_a_time_processes_a_large_batch(
    size_bytes: int, at_once: int
) -> None:
    turns, working, maximum = LargeTurns(), 0, 0

    async def work(on: Batch) -> None:
        nonlocal working, maximum
        async with turns.enter(on):
            working += 1
            maximum = max(maximum, working)
            await asyncio.sleep(0)
            working -= 1

    await asyncio.gather(*(work(batch(number, size_bytes=size_bytes)) for number in range(4)))

    assert maximum == at_once


async def test_a_partition_that_stops_waiting_for_its_turn_blocks_no_other() -> None:
    turns = LargeTurns()
    large = batch(0, size_bytes=LARGE_BYTES + 1)
    async with turns.enter(large):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), turns.enter(large):
                pass
    async with asyncio.timeout(HANG_SECONDS), turns.enter(large):
        pass
