"""Shared by the tests of the Kafka bus: settings, a topic, numbered messages."""

from __future__ import annotations

from gpuledger.bus.protocol import Message
from gpuledger.records import PodRecord
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic

TOPIC = Topic(name="readings", record=PodRecord, key="uid", partitions=2)


def settings_of(servers: str, **others: object) -> KafkaSettings:
    given = {"request_timeout_seconds": 10.0, "session_timeout_seconds": 6.0, **others}
    return KafkaSettings(bootstrap_servers=servers, **given)  # type: ignore[arg-type]  # keywords of KafkaSettings


def numbered(number: int) -> Message:
    return Message(key=b"node-a", value=str(number).encode(), timestamp_ms=number)
