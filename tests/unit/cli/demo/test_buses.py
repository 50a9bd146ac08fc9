"""Which topics the demo writes to."""

import pytest

from cli.demo.buses import refuse_used_topics
from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.errors import TopicsError
from gpuledger.topics import EVENTS, SAMPLES, TOPICS

NAMES = [topic.name for topic in TOPICS]


async def test_topics_without_records_are_taken() -> None:
    await refuse_used_topics(MemoryBus(), NAMES)


async def test_one_record_in_one_of_them_is_somebody_s() -> None:
    """The line names the topic and both remedies."""
    bus = MemoryBus()
    async with bus.producer() as producer:
        await producer.publish(EVENTS.name, 3, [Message(b"node", b"{}", 0)])
    await refuse_used_topics(bus, [SAMPLES.name])
    with pytest.raises(TopicsError, match=rf"{EVENTS.name} holds records .*--reuse-topics"):
        await refuse_used_topics(bus, NAMES)
