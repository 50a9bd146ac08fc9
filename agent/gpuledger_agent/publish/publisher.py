"""Publishes the bundles of the send queue to Kafka, in order, and retries until acknowledged.

Bundles taken from the queue are in flight until the brokers have acknowledged the messages for all
topics, so nothing is lost or reordered. Two kinds of messages are left out and counted because
brokers do not accept them: messages that are too large, and messages stamped by a clock that ran
ahead. The latter are left out only if the broker rejects them and they are also in the future by
the node's present clock. Either clock may be wrong, and earlier ticks must not be lost because a
clock was set back. Before each attempt, `clock_steps` corrects the times of messages that were made
in this boot.

If many bundles wait, they are sent faster than they were made, but not at full speed
(`pause_seconds`), so that many agents that reconnect at once do not flood the brokers.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Final

import structlog

from gpuledger.bus.limits import MAX_MESSAGE_BYTES, size_bytes
from gpuledger.bus.protocol import Bus, Producer
from gpuledger.clock import NS_PER_MS, Clock, SystemClock, boot_time_ns
from gpuledger.errors import BusError, MessageTooLargeError, TimestampRefusedError
from gpuledger.keys import NodeId, node_key
from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.tasks import wait_event
from gpuledger.topics import agreed_partitions, partition_of_node
from gpuledger_agent.metrics import MESSAGES_REJECTED, PUBLISH_FAILURES, RECORDS_PUBLISHED
from gpuledger_agent.publish.clock_steps import shift_times, step_between
from gpuledger_agent.publish.message_bundle import BundledMessage, time_ms
from gpuledger_agent.publish.send_queue import SendQueue

_LONGEST_TICK_MS: Final = 60_000  # a longer gap lies between ticks, not within one


def pause_seconds(times_ms: Sequence[int], *, factor: float, chance: float) -> float:
    """Return how long to wait after sending bundles that were made at `times_ms`, oldest first.

    The wait is the time that it took to make the bundles, divided by `factor` and multiplied by 1
    to 2, depending on the random number `chance` (0 to 1). That time is estimated from the median
    gap between two bundles, because clocks jump and agents are restarted.
    """
    if len(times_ms) < 2:  # noqa: PLR2004  # one bundle is not a backlog
        return 0.0
    steps_ms = sorted(
        min(max(0, after - before), _LONGEST_TICK_MS) for before, after in pairwise(times_ms)
    )
    made_seconds = steps_ms[len(steps_ms) // 2] * len(times_ms) / 1000
    return made_seconds / factor * (1 + chance)


# The same number as in a frame of the spool, so that each batch is one frame.
_BATCH_TICKS: Final = 60
_CLOSING_SECONDS: Final = 2.0
# Maximum difference between a broker's and a node's clock if both are synchronized.
_AHEAD_MS: Final = 60_000
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class SamplePublisher:
    """Publishes the ticks, incidents and inventories of one node."""

    def __init__(
        self,
        *,
        node: NodeId,
        bus: Bus,
        send_queue: SendQueue,
        check: Check,
        backoff: Backoff,
        catch_up_factor: float,
        clock: Clock | None = None,
    ) -> None:
        self._node = node
        self._bus = bus
        self._send_queue = send_queue
        self._check = check
        self._backoff = backoff
        self._catch_up_factor = catch_up_factor
        self._clock = clock or SystemClock()
        self._times_ms: list[int] = []
        self._unsent: dict[str, list[BundledMessage]] = {}
        self._partitions: dict[str, int] = {}
        self._skip_pauses = asyncio.Event()

    def skip_pauses(self) -> None:
        """Send the remaining bundles without the pauses of `pause_seconds`."""
        self._skip_pauses.set()

    async def run(self) -> None:
        """Publish until cancelled; retry with back-off if the broker does not answer."""
        while True:
            try:
                async with self._bus.producer() as producer:
                    await self._publish_from(producer)
            except BusError as error:
                # A missing topic or permission must not stop sampling: it may be added at any time.
                PUBLISH_FAILURES.inc()
                self._check.failed(self._describe_waiting(str(error)))
                # A `RetryingCaller` would reset the back-off at the end of the call; here, each
                # acknowledgement resets it.
                await asyncio.sleep(self._backoff.next_seconds())

    def _describe_waiting(self, trouble: str = "") -> Callable[[], str]:
        """Return a function that returns a text with the number of samples that wait.

        The text starts with `trouble`, if given.
        """
        begin = f"{trouble}; " if trouble else ""
        send_queue = self._send_queue
        return lambda: (
            f"{begin}samples wait: {send_queue.bundles_in_memory} in memory,"
            f" {send_queue.bundles_on_disk} on disk"
        )

    async def _publish_from(self, producer: Producer) -> None:
        samples = self._bus.topics.samples.name
        self._partitions = {samples: await self._bus.partitions(samples)}
        partition = partition_of_node(node_key(self._node), partitions=self._partitions[samples])
        # The query above may succeed although records fail, so the check is ok only if no records
        # wait.
        if not self._times_ms and self._send_queue.is_empty:
            self._check.ok(self._describe_waiting())
        while True:
            if not self._times_ms:
                # These attributes outlast connections, so acknowledged records are not sent again.
                bundles = await self._send_queue.take(max_bundles=_BATCH_TICKS)
                self._unsent = {}
                for bundled in chain.from_iterable(bundles):
                    self._unsent.setdefault(bundled.topic, []).append(bundled)
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
        """Publish the remaining messages of each topic in one batch per topic.

        If a broker rejects a record of a batch, publish the batch's records one by one. Records
        that were acknowledged or dropped are removed from `_unsent`; the others remain. If topics
        failed and no broker rejected a record, raise the first error.
        """
        self._correct_times()
        topics = tuple(self._unsent)
        # Publish all topics at once, samples first: if one broker leads both partitions, samples
        # and other records share one request, and requests are the main cost of sending.
        publishing = [self._publish(producer, topic, partition) for topic in topics]
        # A topic's failure does not affect other topics: each is removed once it is acknowledged.
        outcomes = await asyncio.gather(*publishing, return_exceptions=True)
        errors = [outcome for outcome in outcomes if outcome is not None]
        refused = [
            topic
            for topic, outcome in zip(topics, outcomes, strict=True)
            if isinstance(outcome, MessageTooLargeError | TimestampRefusedError)
        ]
        # The client does not report which record of the batch was rejected, so try each one.
        for topic in refused:
            await self._publish_singly(producer, topic, partition)
        # A rejection ends the client's connection, so other topics in progress fail too. That is
        # not a failure of the brokers, so the other topics are retried at once.
        if errors and not refused:
            raise errors[0]

    def _correct_times(self) -> None:
        """Correct the times of the remaining messages if the clock was set since they were made."""
        now_ns = boot_time_ns(self._clock)
        for unsent in self._unsent.values():
            for number, bundled in enumerate(unsent):
                if step_ns := step_between(bundled.boot_time_ns, now_ns):
                    message = shift_times(bundled.message, step_ns)
                    unsent[number] = bundled._replace(message=message, boot_time_ns=now_ns)

    async def _publish(self, producer: Producer, topic: str, partition: int) -> None:
        """Publish the remaining messages of a topic in one batch.

        Raise `TopicsError` if the topic has another number of partitions than the samples' topic.
        The number is queried once per topic and producer, just before the topic's first record, so
        that samples do not wait for the queries of other topics.
        """
        if topic not in self._partitions:
            self._partitions[topic] = await self._bus.partitions(topic)
            agreed_partitions(self._partitions)
        bundled = self._unsent[topic] = _without_oversized(self._unsent[topic])
        messages = [one.message for one in bundled]
        await producer.publish(topic, partition, messages)
        RECORDS_PUBLISHED.labels(topic=topic).inc(len(messages))
        del self._unsent[topic]

    async def _publish_singly(self, producer: Producer, topic: str, partition: int) -> None:
        """Publish a topic's records one by one, leaving out records that brokers do not accept.

        Raise `TimestampRefusedError` for a rejected record that is not in the future by this node's
        clock. That record and the following ones are retried later.
        """
        unsent = self._unsent[topic]
        while unsent:
            message = unsent[0].message
            try:
                await producer.publish(topic, partition, [message])
                RECORDS_PUBLISHED.labels(topic=topic).inc()
            except MessageTooLargeError as error:
                MESSAGES_REJECTED.labels(reason="too_large").inc()
                _log_dropped(str(error), 1)
            except TimestampRefusedError:
                # Read the clock at each attempt, because it may have been corrected since.
                now_ms = self._clock.time_ns() // NS_PER_MS
                if message.timestamp_ms <= now_ms + _AHEAD_MS:
                    raise
                MESSAGES_REJECTED.labels(reason="future").inc()
                _log_dropped("timestamp in the future; check the node's clock", 1)
            del unsent[0]
        del self._unsent[topic]


def _without_oversized(messages: Sequence[BundledMessage]) -> list[BundledMessage]:
    """Return the messages that are not too large for brokers; log and count the others."""
    small = [
        bundled
        for bundled in messages
        if size_bytes(bundled.message.key, bundled.message.value) <= MAX_MESSAGE_BYTES
    ]
    if refused := len(messages) - len(small):
        MESSAGES_REJECTED.labels(reason="too_large").inc(refused)
        _log_dropped(f"larger than {MAX_MESSAGE_BYTES} bytes", refused)
    return small


def _log_dropped(detail: str, count: int) -> None:
    """Log that messages were dropped, at most once a minute for each reason."""
    if logged := _repeats.count(detail, more=count):
        _log.error("messages_dropped", detail=detail, count=logged)


async def shut_down(
    publisher: SamplePublisher, send_queue: SendQueue, *tasks: "asyncio.Task[None]", seconds: float
) -> None:
    """Let the publisher send the bundles in memory for `seconds`, then end the tasks and the queue.

    Remaining bundles are spooled to disk, or logged as lost if that fails. If bundles wait in the
    spool, nothing is sent, because these older bundles would have to be sent first. All bundles
    then wait for the next start of the agent.
    """
    publisher.skip_pauses()
    draining = asyncio.create_task(send_queue.wait_drained())
    if not send_queue.is_on_disk:
        waited_for = {draining, *tasks}
        await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, *tasks):
        task.cancel()
    # Spool after cancelling the tasks, because they would take bundles that are being spooled.
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSING_SECONDS):
            await send_queue.spill_all()
    if send_queue.bundles_in_memory:
        _log.error("samples_lost", count=send_queue.bundles_in_memory)
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSING_SECONDS):
            await send_queue.close()
    await asyncio.wait((draining, *tasks), timeout=_CLOSING_SECONDS)
