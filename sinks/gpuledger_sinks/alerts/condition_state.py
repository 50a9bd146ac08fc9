"""The state topic of conditions: read when a partition is taken over, written before its offsets.

For how long conditions have held on a node lies in `conditions.v1`. It is written before the
offsets of the ticks that it counts are committed: who goes on from an older offset passes over the
ticks that are counted already, by boot and `seq`. A former owner that writes late makes conditions
younger than they are, so that an alert comes later after the next restart, and never too early.
"""

from collections.abc import Mapping
from typing import Final

import structlog

from gpuledger.bus.protocol import HistoryReader, Message, Producer, TopicPartition
from gpuledger.clock import NS_PER_DAY, NS_PER_MS, Clock
from gpuledger.codec import encode
from gpuledger.errors import UndecodableError
from gpuledger.keys import group_key
from gpuledger.records import NodeConditions
from gpuledger.runtime.logs import Repeats
from gpuledger_sinks.group_state import read_states

NodeStates = Mapping[str, NodeConditions | None]
"""The conditions of nodes, by their keys; `None` where none holds any more."""
_KEPT_NS: Final = NS_PER_DAY
"""What was written so long before the newest of its partition says nothing of what holds now."""
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class ConditionState:
    """The conditions that the sinks of one group have seen, as the state topic has them."""

    def __init__(
        self,
        *,
        topic: str,
        group: str,
        history: HistoryReader,
        producer: Producer,
        clock: Clock,
    ) -> None:
        self.group, self._clock = group, clock
        self._topic, self._history, self._producer = topic, history, producer
        self._outdated: dict[int, list[str]] = {}

    async def read(self, number: int) -> list[NodeConditions]:
        """Return what is known of the nodes of a partition; raises BusError."""
        found = await read_states(
            self._history,
            TopicPartition(self._topic, number),
            NodeConditions,
            group=self.group,
            kept_ns=_KEPT_NS,
            skip=_skip,
        )
        self._outdated[number] = found.outdated
        return list(found.states.values())

    async def write(self, number: int, states: NodeStates) -> None:
        """Return once the brokers have the conditions of these nodes; raises BusError."""
        # With the first write, as nothing is written where nothing has changed.
        gone = dict.fromkeys(self._outdated.get(number, ()))
        messages = [self._message(node, state) for node, state in {**gone, **states}.items()]
        await self._producer.publish(self._topic, number, messages)
        self._outdated.pop(number, None)

    def _message(self, node: str, state: NodeConditions | None) -> Message:
        return Message(
            key=group_key(self.group, node).encode(),
            value=None if state is None else encode(state),
            timestamp_ms=self._clock.time_ns() // NS_PER_MS,
        )


def _skip(key: str, error: UndecodableError) -> None:
    # Its conditions begin anew.
    if count := _repeats.count("conditions"):
        _log.warning("conditions_skipped", key=key, count=count, error=str(error))
