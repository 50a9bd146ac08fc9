"""What is written of conditions: all of it, also where the brokers were away at first."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Producer
from gpuledger.clock import NS_PER_DAY, NS_PER_MS
from gpuledger.codec import encode
from gpuledger.errors import BusUnavailableError
from gpuledger.keys import group_key
from gpuledger.records import NodeConditions
from gpuledger_sinks.alerts.condition_state import ConditionState
from tests.unit.sinks.builders import START_NS, ManualClock, bus

GROUP = "alerts"


class AwayAtFirst(Producer):
    """A producer whose brokers do not answer to the first message."""

    def __init__(self, to: Producer) -> None:
        self._to, self._is_away = to, True

    @override
    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if self._is_away:
            self._is_away = False
            raise BusUnavailableError("no answer")
        await self._to.publish(topic, partition, messages)


def conditions(node: str, time_ns: int) -> NodeConditions:
    return NodeConditions(group=GROUP, cluster="default", node=node, time_ns=time_ns, conditions=[])


def message(state: NodeConditions, *, written_ns: int) -> Message:
    key = group_key(GROUP, f"{state.cluster}/{state.node}").encode()
    return Message(key=key, value=encode(state), timestamp_ms=written_ns // NS_PER_MS)


async def keys_without_a_value(on: MemoryBus) -> list[bytes | None]:
    return [record.key for record in on.kept(on.topics.conditions.name) if record.value is None]


async def test_nodes_that_are_gone_are_removed_once_the_brokers_are_back() -> None:
    on = bus()
    topic = on.topics.conditions.name
    # Whatever their clocks say.
    gone, there = conditions("gone", 2 * START_NS), conditions("there", 0)
    written = [
        message(gone, written_ns=START_NS),
        message(there, written_ns=START_NS + 2 * NS_PER_DAY),
    ]
    async with on.producer() as producer, on.reader() as history:
        await producer.publish(topic, 0, written)
        state = ConditionState(
            topic=topic,
            group=GROUP,
            history=history,
            producer=AwayAtFirst(producer),
            clock=ManualClock(),
        )
        assert await state.read(0) == [there]
        with pytest.raises(BusUnavailableError):
            await state.write(0, {})
        await state.write(0, {})
        await state.write(0, {})

    assert await keys_without_a_value(on) == [written[0].key]
