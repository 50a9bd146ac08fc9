"""Batches are compressed on the way to the brokers and decompressed on the way back."""

import sys
from collections.abc import Iterator
from typing import cast

import cramjam
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import CorruptRecordException
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from gpuledger.bus.aiokafka_patches import packing
from gpuledger.bus.aiokafka_patches.packing import pack_at_least_cost
from gpuledger.bus.aiokafka_patches.unpacking import install_unpacking
from gpuledger.bus.kafka_producer import pack
from gpuledger.bus.limits import MAX_BATCH_RECORDS
from gpuledger.bus.protocol import Message

_ZSTD = 4
# Compression levels differ for data that repeats itself at varying distances, as ticks do.
VALUES = [b",".join(b"%d" % (number * n % 977) for n in range(900)) for number in range(1, 40)]


def packed() -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=_ZSTD,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    for number, value in enumerate(VALUES):
        builder.append(number, timestamp=1, key=None, value=value, headers=[])
    return bytes(builder.build())


@pytest.fixture
def _without_zstandard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a node, which has only aiokafka's own compression library."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    packing.packer.cache_clear()
    yield
    packing.packer.cache_clear()


@pytest.mark.usefixtures("_without_zstandard")
def test_agents_compress_batches_at_the_cheapest_level() -> None:
    pack_at_least_cost()
    body = body_of(packed())
    records = bytes(cramjam.zstd.decompress(body))

    at_levels = {level: bytes(cramjam.zstd.compress(records, level=level)) for level in (1, 3)}
    assert at_levels[1] != at_levels[3]
    assert body == at_levels[1]


def test_a_reused_compression_context_hardly_increases_the_size() -> None:
    pack_at_least_cost()
    once, again = body_of(packed()), body_of(packed())
    records = bytes(cramjam.zstd.decompress(once))

    assert once == again
    assert bytes(cramjam.zstd.compress(records, level=1)) != once
    assert len(once) < 1.05 * len(bytes(cramjam.zstd.compress(records, level=1)))


def body_of(batch: bytes) -> bytes:
    return batch[61:]  # after the batch header, whose length the protocol fixes


def values_in(batch: bytes) -> list[bytes]:
    return [each.value for each in DefaultRecordBatch(bytearray(batch))]


def test_batches_are_decompressed_to_what_was_compressed() -> None:
    install_unpacking()

    assert values_in(packed()) == VALUES


def test_a_truncated_batch_is_not_mistaken_for_a_short_one() -> None:
    install_unpacking()

    with pytest.raises(CorruptRecordException):
        values_in(packed()[:-20])


class Client:
    """Makes batches as the producing client does."""

    def create_batch(self) -> BatchBuilder:
        return BatchBuilder(1_000_000, _ZSTD)


def test_no_batch_has_more_records_than_its_readers_accept() -> None:
    """However small the records are: a node's tombstone has five bytes."""
    tombstones = [Message(b"a", None, 0)] * (2 * MAX_BATCH_RECORDS + 5)
    batches = list(pack(cast("AIOKafkaProducer", Client()), tombstones))

    counts = [batch.record_count() for batch in batches]
    assert sum(counts) == len(tombstones)
    assert max(counts) == MAX_BATCH_RECORDS
