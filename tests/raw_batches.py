"""Kafka's record batches by hand, for bytes that no client of ours writes, and their producer.

The format is that of magic 2: https://kafka.apache.org/documentation/#recordbatch
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import zstandard
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.errors import NotLeaderForPartitionError
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.util import calc_crc32c, encode_varint

if TYPE_CHECKING:
    from collections.abc import Sequence

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
_HEAD = struct.Struct(">qiibIhiqqqhii")
_CHECKED = struct.Struct(">hiqqqhii")
_SKIPPED_MAGIC = 0x184D2A50
_LEADER_SECONDS = 120.0
_PAUSE_SECONDS = 0.1


class Raw(NamedTuple):
    """A record as bytes, including the names of its headers."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[bytes, bytes]] = ()


def body(records: Sequence[Raw], *, deltas: Sequence[int] | None = None) -> bytes:
    """Return the records of a batch before compression.

    `deltas` are their offsets from the first record of the batch; the default is 0, 1, 2 ..., as
    clients write.
    """
    numbered = zip(range(len(records)) if deltas is None else deltas, records, strict=True)
    return b"".join(_record(delta, record) for delta, record in numbered)


def empty_headers(count: int, *, at: int = 0) -> bytes:
    """Return one record with this many headers without a name or content."""
    inside = b"\0" + encoded(0) + encoded(at) + _bytes(b"k") + _bytes(b"{}") + encoded(count)
    return encoded(len(inside) + 2 * count) + inside + bytes(2 * count)


def batch(
    packed: bytes, *, count: int, codec: int = NONE, time_ms: int, base_offset: int = 0
) -> bytes:
    """Return a complete batch of `count` records, with its checksum."""
    checked = _CHECKED.pack(codec, count - 1, time_ms, time_ms, -1, -1, -1, count) + packed
    head = struct.pack(">iBI", -1, 2, calc_crc32c(checked))
    return struct.pack(">qi", base_offset, len(head) + len(checked)) + head + checked


def pack(data: bytes, codec: int) -> bytes:
    """Compress as other clients do."""
    packers = {GZIP: gzip_encode, SNAPPY: snappy_encode, LZ4: lz4_encode, ZSTD: zstd_encode}
    return bytes(packers[codec](data)) if codec else data


def skipped_frame(content: bytes) -> bytes:
    """Return a zstd frame that decoders skip."""
    return struct.pack("<II", _SKIPPED_MAGIC, len(content)) + content


def two_frames(data: bytes) -> bytes:
    """Compress like a client that flushes between records: several frames, and frames to skip."""
    half = len(data) // 2
    parts = (data[:half], data[half:])
    packed = [zstandard.ZstdCompressor().compress(part) for part in parts]
    return skipped_frame(b"anything") + skipped_frame(b"more").join(packed)


def bomb(size_bytes: int, *, declares_size: bool = True) -> bytes:
    """Compress one record of zeros, which zstd makes about a thousand times smaller."""
    inside = b"\0\0\0" + _bytes(b"k") + encoded(size_bytes)  # no attributes, deltas 0
    head = encoded(len(inside) + size_bytes + 1) + inside
    total = len(head) + size_bytes + 1 if declares_size else -1
    compressor = zstandard.ZstdCompressor().compressobj(size=total)
    packed = compressor.compress(head)
    zeros = bytes(1 << 20)
    for left in range(size_bytes, 0, -len(zeros)):
        packed += compressor.compress(zeros[: min(left, len(zeros))])
    return packed + compressor.compress(b"\0") + compressor.flush()  # no headers


async def produce(servers: str, topic: str, partition: int, data: bytes) -> int:
    """Send a batch to a broker as it is; return the offset of its first record."""
    client = AIOKafkaClient(bootstrap_servers=servers)
    await client.bootstrap()
    try:
        await client.set_topics([topic])
        async with asyncio.timeout(_LEADER_SECONDS):
            code, offset = await _send(client, topic, partition, data)
            while code == NotLeaderForPartitionError.errno:
                await asyncio.sleep(_PAUSE_SECONDS)
                await client.force_metadata_update()
                code, offset = await _send(client, topic, partition, data)
    finally:
        await client.close()
    assert code == 0, f"the broker refused it: {code}"
    return offset


async def _send(client: Any, topic: str, partition: int, data: bytes) -> tuple[int, int]:  # noqa: ANN401  # untyped
    """Return a broker's error code, and the offset that it gave to the batch."""
    leader = client.cluster.leader_for_partition(TopicPartition(topic, partition))
    if leader is None or leader < 0:  # a new topic has no leader yet
        return NotLeaderForPartitionError.errno, -1
    request = ProduceRequest(None, -1, 20_000, [(topic, [(partition, data)])])
    answer = await client.send(leader, request)
    ((_, ((_, code, offset, *_),)),) = answer.topics
    return code, offset


def encoded(number: int) -> bytes:
    """Encode a number as in records: zigzag, seven bits per byte."""
    into = bytearray()
    encode_varint(number, into.append)
    return bytes(into)


def _record(delta: int, record: Raw) -> bytes:
    parts = [b"\0", encoded(0), encoded(delta), _bytes(record.key), _bytes(record.value)]
    parts.append(encoded(len(record.headers)))
    for name, content in record.headers:
        parts += (_bytes(name), _bytes(content))
    inside = b"".join(parts)
    return encoded(len(inside)) + inside


def _bytes(content: bytes | None) -> bytes:
    return encoded(-1) if content is None else encoded(len(content)) + content
