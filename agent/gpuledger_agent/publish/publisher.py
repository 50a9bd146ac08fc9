"""From the send queue to the broker, in order, again and again until the broker has acknowledged.

Here lives the loop that publishes. What is taken out of the queue is in flight until all of its
topics are acknowledged, so nothing is lost and nothing overtakes. What no broker will ever take is
left out, counted: what is too large, and what a clock stamped that ran ahead. The latter is left
out only where the broker refuses it and this node's clock, as it is now, agrees: either clock alone
may be the wrong one, and one that was set back must not cost the ticks made before.

What has waited is sent faster than it was made, but not as fast as it can be (`pause_seconds`): a
fleet that comes back must not flood the brokers.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Final

import structlog

from gpuledger.bus.limits import MAX_MESSAGE_BYTES, size_bytes
from gpuledger.bus.protocol import Bus, Message, Producer
from gpuledger.clock import NS_PER_MS
from gpuledger.errors import BusError, MessageTooLargeError, TimestampRefusedError
from gpuledger.keys import NodeId, node_key
from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.tasks import wait_event
from gpuledger.topics import agreed_partitions, partition_of_node
from gpuledger_agent.metrics import MESSAGES_REJECTED, PUBLISH_FAILURES, RECORDS_PUBLISHED
from gpuledger_agent.publish.message_bundle import time_ms
from gpuledger_agent.publish.send_queue import SendQueue

_LONGEST_TICK_MS: Final = 60_000  # what lies further apart is no ticks to be spread


def pause_seconds(times_ms: Sequence[int], *, factor: float, chance: float) -> float:
    """Return how long to wait after sending what was made at `times_ms`, in their order.

    At least their time divided by `factor`; at most twice that, by `chance` (0 to 1). Their time
    goes by the median of their distances: clocks leap, and agents are away.
    """
    if len(times_ms) < 2:  # noqa: PLR2004  # a single one was not kept waiting by another
        return 0.0
    steps_ms = sorted(
        min(max(0, after - before), _LONGEST_TICK_MS) for before, after in pairwise(times_ms)
    )
    made_seconds = steps_ms[len(steps_ms) // 2] * len(times_ms) / 1000
    return made_seconds / factor * (1 + chance)


# As many as a frame of the spool: what is read from there is sent as it was written.
_BATCH_TICKS: Final = 60
_CLOSING_SECONDS: Final = 2.0
# A broker's and a node's clock differ by less than this where both are synchronised.
_AHEAD_MS: Final = 60_000
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class SamplePublisher:
    """Publishes one node's ticks."""

    def __init__(
        self,
        *,
        node: NodeId,
        bus: Bus,
        send_queue: SendQueue,
        check: Check,
        backoff: Backoff,
        catch_up_factor: float,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._node = node
        self._bus = bus
        self._send_queue = send_queue
        self._check = check
        self._backoff = backoff
        self._catch_up_factor = catch_up_factor
        self._now_ns = now_ns
        self._times_ms: list[int] = []
        self._unsent: dict[str, list[Message]] = {}
        self._partitions: dict[str, int] = {}
        self._skip_pauses = asyncio.Event()

    def skip_pauses(self) -> None:
        """Send what is left without any pause."""
        self._skip_pauses.set()

    async def run(self) -> None:
        """Publish for ever; a broker that does not answer is asked again, with a back-off."""
        while True:
            try:
                async with self._bus.producer() as producer:
                    await self._publish_from(producer)
            except BusError as error:
                # A missing topic or right is no reason to stop sampling: it may come in a moment.
                PUBLISH_FAILURES.inc()
                self._check.failed(self._describe_waiting(str(error)))
                # Not a `RetryingCaller`: what is repeated goes on for as long as the brokers take
                # records, so that an acknowledgement resets the waits, and not its end.
                await asyncio.sleep(self._backoff.next_seconds())

    def _describe_waiting(self, trouble: str = "") -> Callable[[], str]:
        """Return a function that describes how much waits for the broker."""
        begin = f"{trouble}; " if trouble else ""
        send_queue = self._send_queue
        return lambda: (
            f"{begin}ticks wait: {send_queue.bundles_in_memory} in memory,"
            f" {send_queue.bundles_on_disk} on the disk"
        )

    async def _publish_from(self, producer: Producer) -> None:
        samples = self._bus.topics.samples.name
        self._partitions = {samples: await self._bus.partitions(samples)}
        partition = partition_of_node(node_key(self._node), partitions=self._partitions[samples])
        # Brokers may answer this and take no record; only where none waits is it all there is.
        if not self._times_ms and self._send_queue.is_empty:
            self._check.ok(self._describe_waiting())
        while True:
            if not self._times_ms:
                # Kept over a lost connection: what is acknowledged is not sent again.
                bundles = await self._send_queue.take(max_bundles=_BATCH_TICKS)
                self._unsent = {}
                for topic, message in chain.from_iterable(bundles):
                    self._unsent.setdefault(topic, []).append(message)
                self._times_ms = [time_ms(bundle) for bundle in bundles]
            while self._unsent:
                await self._publish_unsent(producer, partition)
            await self._send_queue.ack()
            times_ms, self._times_ms = self._times_ms, []
            self._backoff.reset()
            self._check.ok(self._describe_waiting())
            chance = random.random()  # noqa: S311  # jitter, no secret
            pause = pause_seconds(times_ms, factor=self._catch_up_factor, chance=chance)
            if pause > 0:
                await wait_event(self._skip_pauses, pause)

    async def _publish_unsent(self, producer: Producer, partition: int) -> None:
        """Publish all topics' batches, and singly what was refused; the rest is left unsent.

        What was taken or dropped is out of what is unsent for good.
        """
        topics = tuple(self._unsent)
        # At once, and a tick's sample first: so one request has it and what describes it, where a
        # broker leads both partitions. A request is what sending costs.
        publishing = [self._publish(producer, topic, partition) for topic in topics]
        # What fails costs the others nothing: each is out of what is unsent once it is taken.
        outcomes = await asyncio.gather(*publishing, return_exceptions=True)
        errors = [outcome for outcome in outcomes if outcome is not None]
        refused = [
            topic
            for topic, outcome in zip(topics, outcomes, strict=True)
            if isinstance(outcome, MessageTooLargeError | TimestampRefusedError)
        ]
        # Which record of the batch it was the client does not say: each is tried by itself.
        for topic in refused:
            await self._publish_singly(producer, topic, partition)
        # A client ends with what it was refused, and what it was sending beside fails with it:
        # that is no failure of the brokers, and is sent again at once.
        if errors and not refused:
            raise errors[0]

    async def _publish(self, producer: Producer, topic: str, partition: int) -> None:
        """Publish what is left of a topic in a batch.

        Raises `TopicsError` where the topic has another number of partitions than the ticks'. Asked
        once a topic and producer, when there is something for it: ticks do not wait for the others.
        """
        if topic not in self._partitions:
            self._partitions[topic] = await self._bus.partitions(topic)
            agreed_partitions(self._partitions)
        messages = self._unsent[topic] = _without_oversized(self._unsent[topic])
        await producer.publish(topic, partition, messages)
        RECORDS_PUBLISHED.labels(topic=topic).inc(len(messages))
        del self._unsent[topic]

    async def _publish_singly(self, producer: Producer, topic: str, partition: int) -> None:
        """Publish a topic one by one, without what this broker does not take.

        Raises `TimestampRefusedError` for what this node's clock does not call ahead: it is sent
        again later, with what comes behind it and nothing that came before.
        """
        unsent = self._unsent[topic]
        while unsent:
            message = unsent[0]
            try:
                await producer.publish(topic, partition, [message])
                RECORDS_PUBLISHED.labels(topic=topic).inc()
            except MessageTooLargeError as error:
                MESSAGES_REJECTED.labels(reason="too_large").inc()
                _log_dropped(str(error), 1)
            except TimestampRefusedError:
                # Looked at with each attempt: the clock may have been set right since.
                now_ms = self._now_ns() // NS_PER_MS
                if message.timestamp_ms <= now_ms + _AHEAD_MS:
                    raise
                MESSAGES_REJECTED.labels(reason="future").inc()
                _log_dropped("from the future: look at the node's clock", 1)
            del unsent[0]
        del self._unsent[topic]


def _without_oversized(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without those that no broker takes: they would be refused for ever."""
    small = [
        message
        for message in messages
        if size_bytes(message.key, message.value) <= MAX_MESSAGE_BYTES
    ]
    if refused := len(messages) - len(small):
        MESSAGES_REJECTED.labels(reason="too_large").inc(refused)
        _log_dropped(f"larger than {MAX_MESSAGE_BYTES} bytes", refused)
    return small


def _log_dropped(detail: str, count: int) -> None:
    """Log once a minute what is left out, as it may be every message for hours."""
    if logged := _repeats.count(detail, more=count):
        _log.error("messages_dropped", detail=detail, count=logged)


async def shut_down(
    publisher: SamplePublisher, send_queue: SendQueue, *tasks: "asyncio.Task[None]", seconds: float
) -> None:
    """Let the publisher send what is in memory for `seconds`, then end its tasks and the queue.

    What remains is brought to the disk; what cannot be is logged. Where the disk holds something
    already, its turn would come first, and it waits for the next start as well as the rest.
    """
    publisher.skip_pauses()
    draining = asyncio.create_task(send_queue.wait_drained())
    if not send_queue.is_on_disk:
        waited_for = {draining, *tasks}
        await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, *tasks):
        task.cancel()
    # Not before they are told to end: they would take out what is being spilled.
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSING_SECONDS):
            await send_queue.spill_all()
    if send_queue.bundles_in_memory:
        _log.error("samples_lost", count=send_queue.bundles_in_memory)
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSING_SECONDS):
            await send_queue.close()
    await asyncio.wait((draining, *tasks), timeout=_CLOSING_SECONDS)
