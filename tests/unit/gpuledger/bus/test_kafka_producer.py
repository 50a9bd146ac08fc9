"""A closed producer never opens a client again, because no one would close it."""

import pytest

from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.kafka_producer import KafkaProducer
from gpuledger.bus.protocol import Message
from gpuledger.errors import BusUnavailableError
from gpuledger.settings import KafkaSettings
from tests.default_topics import PODS


async def test_a_closed_producer_publishes_nothing() -> None:
    producer = KafkaProducer(KafkaConnection(KafkaSettings(client_id="test")))
    await producer.close()
    with pytest.raises(BusUnavailableError, match="the producer is closed"):
        await producer.publish(PODS.name, 0, [Message(b"key", b"value", 0)])
