"""Reads the times of transaction markers, which aiokafka's consumer skips.

The leader of a partition ends each transaction with a marker, and writes its own clock's time into
it. Kafka shows the clocks of brokers nowhere else.
"""

from collections.abc import Mapping
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record import MemoryRecords

_MAX_WAIT_MS: Final = 100
_MAX_BYTES: Final = 64 * 1024
_READ_UNCOMMITTED: Final = 0


async def fetch_marker_times(
    admin: AIOKafkaAdminClient, topic: str, ends: Mapping[int, int]
) -> list[int]:
    """Return the time of the last marker of each partition, in milliseconds since the epoch.

    `ends` has the last stable offset by partition, which follows a marker if the topic is only
    written in transactions. Partitions whose last record is not a marker are left out. Raises
    aiokafka's errors.
    """
    client = admin._client
    client.add_topic(topic)
    await client.force_metadata_update()
    times: list[int] = []
    for number, end in ends.items():
        node = client.cluster.leader_for_partition(TopicPartition(topic, number))
        if node is None or node == -1:
            raise KafkaConnectionError(f"no leader of {topic}-{number} is known")
        request = FetchRequest(
            _MAX_WAIT_MS,
            1,
            _MAX_BYTES,
            _READ_UNCOMMITTED,
            [(topic, [(number, end - 1, _MAX_BYTES)])],
        )
        answer = await client.send(node, request)
        for _, partitions in answer.topics:
            for partition in partitions:
                times += _times_in(partition, first=end - 1)
    return times


def _times_in(partition: Any, *, first: int) -> list[int]:  # noqa: ANN401  # aiokafka is untyped
    number, error_code, *_, batches = partition
    if error_code:
        raise for_code(error_code)(f"fetching partition {number}")
    records, times = MemoryRecords(batches), []
    while records.has_next():
        batch = records.next_batch()
        if batch.is_control_batch and batch.base_offset >= first:
            times.append(batch.max_timestamp)
    return times
