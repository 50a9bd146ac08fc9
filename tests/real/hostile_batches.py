"""Batches on a real broker that our clients never write, and their offsets."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError

from gpuledger.bus.limits import MAX_BATCH_RECORDS
from tests import raw_batches
from tests.raw_batches import GZIP, LZ4, NONE, SNAPPY, ZSTD, Raw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.real.services.kafka import Kafka

GIBIBYTE = 1 << 30
NOTHING = Raw(b"k", None)
MAX_AND_ONE = MAX_BATCH_RECORDS + 1
NAMELESS = [(b"\xff\xfe", b"anything")]


class Hostile(NamedTuple):
    """A way to write a batch of records that cannot be unpacked."""

    pack: Callable[[bytes], bytes]
    codec: int
    headers: Sequence[tuple[bytes, bytes]] = ()
    claimed_count: int | None = None
    """The number of records that it claims, if it differs from the real one."""
    deltas: Sequence[int] | None = None
    """The offsets that its records claim, relative to its first, if not 0, 1, 2 ..."""


def _same(data: bytes) -> bytes:
    return data


HEADERS = Hostile(
    lambda _: raw_batches.pack(raw_batches.empty_headers(4_000_000), ZSTD), ZSTD, claimed_count=1
)
"""342 bytes, or a second of a consumer's time if it reads all of it."""
HOSTILE = {
    "a header's name that is not UTF-8": Hostile(_same, NONE, NAMELESS),
    "the same, packed": Hostile(lambda data: raw_batches.pack(data, ZSTD), ZSTD, NAMELESS),
    "records behind their batch": Hostile(_same, NONE, deltas=(3, 4, 5)),
    "records far behind their batch": Hostile(_same, NONE, deltas=(10**6, 10**6 + 1, 10**6 + 2)),
    "records before their batch": Hostile(_same, NONE, deltas=(-5, -4, -3)),
    "gzip": Hostile(lambda data: raw_batches.pack(data, GZIP), GZIP),
    "snappy": Hostile(lambda data: raw_batches.pack(data, SNAPPY), SNAPPY),
    "lz4": Hostile(lambda data: raw_batches.pack(data, LZ4), LZ4),
    "more records than any of ours": Hostile(
        lambda _: raw_batches.pack(raw_batches.body([NOTHING] * MAX_AND_ONE), ZSTD),
        ZSTD,
        claimed_count=MAX_AND_ONE,
    ),
    "more headers than any of ours": HEADERS,
    "a bomb": Hostile(lambda _: raw_batches.bomb(GIBIBYTE), ZSTD, claimed_count=1),
    "a bomb without its size": Hostile(
        lambda _: raw_batches.bomb(GIBIBYTE, declares_size=False), ZSTD, claimed_count=1
    ),
}
"""Batches that a broker accepts and no consumer can read."""
LEGAL = {
    "two frames, and one to be skipped": Hostile(raw_batches.two_frames, ZSTD),
    "a frame to be skipped": Hostile(
        lambda data: raw_batches.skipped_frame(b"x") + raw_batches.pack(data, ZSTD), ZSTD
    ),
}
"""Batches that other producers may write, and every consumer must read."""


async def write(
    kafka: Kafka, place: TopicPartition, how: Hostile, records: Sequence[Raw]
) -> tuple[int, int]:
    """Write a batch; return the offsets of its first and its last record."""
    named = [record._replace(headers=how.headers) for record in records]
    count = how.claimed_count or len(named)
    packed = how.pack(raw_batches.body(named, deltas=how.deltas))
    data = raw_batches.batch(
        packed, count=count, codec=how.codec, time_ms=time.time_ns() // 1_000_000
    )
    first = await raw_batches.produce(kafka.bootstrap_servers, place.topic, place.partition, data)
    return first, first + count - 1


async def committed(kafka: Kafka, group: str, place: TopicPartition) -> int | None:
    """Return the offset that a group has committed."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    try:
        found = await admin.list_consumer_group_offsets(group)
    except GroupCoordinatorNotAvailableError:
        return None  # the group does not exist yet
    finally:
        await admin.close()
    return found[place].offset if place in found else None


def max_memory_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (kilobytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(kilobytes) * 1024
