"""Publishes a node's newest inventory again: every hour, and if its topic was recreated.

The inventory is lost if its topic is deleted or the brokers are wiped, and the node's hardware may
not change for months. A repeated inventory is the same record with the same time, so consumers do
not regard it as a change.
"""

from typing import Final

import structlog

from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_SECOND, Clock, SystemClock
from gpuledger.errors import BusError
from gpuledger_agent.publish.send_queue import SendQueue

QUERY_SECONDS: Final = 60.0
"""Time between two queries for the topic's id, which use the publisher's connection."""
REPEAT_SECONDS: Final = 3600.0
_log = structlog.get_logger(__name__)


class InventoryRepeats:
    """Queues the newest inventory of one node again when it is due."""

    def __init__(self, *, bus: Bus, send_queue: SendQueue, clock: Clock | None = None) -> None:
        # Not the clock of a simulated node, because the brokers are real.
        self._clock = clock or SystemClock()
        self._bus = bus
        self._send_queue = send_queue
        self._topic_id: str | None = None

    async def run(self) -> None:
        """Queue the inventory when it is due, until cancelled."""
        queued_ns = self._clock.monotonic_ns()
        while True:
            is_other = await self._find_other_topic()
            now_ns = self._clock.monotonic_ns()
            if is_other or now_ns - queued_ns >= REPEAT_SECONDS * NS_PER_SECOND:
                self._send_queue.repeat_inventory()
                queued_ns = now_ns
            await self._clock.sleep(QUERY_SECONDS)

    async def _find_other_topic(self) -> bool:
        """Query the topic's id; return whether it differs from the one known before.

        An id that was unknown before counts as different, because the newest inventory may have
        been published to another topic: no query succeeds until the publisher is connected.
        """
        topic = self._bus.topics.inventory.name
        try:
            found = await self._bus.topic_id(topic)
        except BusError:
            return False  # the publisher reports missing brokers, topics and permissions
        if found is None or found == self._topic_id:
            return False
        if self._topic_id is not None:
            _log.warning("topic_recreated", topic=topic)
        self._topic_id = found
        return True
