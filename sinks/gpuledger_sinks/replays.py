"""Events that an operator replays: read from the replay topic and delivered again.

A sink of a kind that takes replays runs a second consumer in the group `<group>-replay`. Replays
therefore neither delay new events nor change the sink's offsets, series or transactions. The
consumer takes only the events that name its group from the replay topic.

An event that is rejected again becomes another dead letter of the sink's own group. Offsets are
committed only after delivery, so a sink that is killed may deliver a few events twice. This does no
harm: `Sink.redeliver` is idempotent, or its readers recognise repeated records by their identity.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from typing_extensions import override

from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import encode
from gpuledger.keys import node_key
from gpuledger.records import ReplayedEvent
from gpuledger.runtime import RetryingCaller
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.protocol import Batch, Partitions, RejectedEvent, Sink, SinkContext

MAX_POLL_RECORDS: Final = 100
_MAX_BYTES: Final = 2**20
"""Maximum size of the events of one delivery, because their labels may take a hundred times as much
memory."""


class ReplaySink(Sink):
    """Delivers replayed events to a sink, if they name the sink's group."""

    def __init__(
        self,
        sink: Sink,
        *,
        group: str,
        events: str,
        retrying: RetryingCaller[ReceiverUnavailableError],
    ) -> None:
        """Deliver the replayed events of `group` with `sink`, which reads the topic `events`."""
        self.name, self.receiver = f"{sink.name}_replay", sink.receiver
        self._sink, self._group, self._events = sink, group, events
        self._retrying = retrying

    @override
    async def assign(self, partitions: Partitions) -> None:
        """Do nothing: there is no state per partition."""

    @override
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        """Do nothing: there is no state per partition."""

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Deliver the polled events; events that are rejected again become dead letters."""
        for batch in batches:
            for part in self._parts(batch):
                if not context.is_current(batch.partition):
                    break
                rejected = [self._rejected(replayed) for _, replayed in part]
                answers = await self._retrying(partial(self._sink.redeliver, rejected))
                for each, refusal in zip(rejected, answers, strict=True):
                    if refusal is not None:
                        context.dead_letters.reject(
                            each.record, reason=refusal.reason, detail=refusal.detail
                        )
                context.acknowledge(batch.partition, part[-1][0].offset + 1)
            context.acknowledge(batch.partition, batch.next_offset)

    def _parts(self, batch: Batch) -> Iterator[list[tuple[Record, ReplayedEvent]]]:
        """Yield the events that name the group, in parts that the sink can take at once."""
        part: list[tuple[Record, ReplayedEvent]] = []
        size_bytes = 0
        for record, replayed in batch.items:
            if replayed.consumer != self._group:
                continue
            part.append((record, replayed))
            size_bytes += len(record.value or b"")
            if len(part) >= self._sink.max_redelivered or size_bytes >= _MAX_BYTES:
                yield part
                part, size_bytes = [], 0
        if part:
            yield part

    def _rejected(self, replayed: ReplayedEvent) -> RejectedEvent:
        event = replayed.event
        return RejectedEvent(
            Record(
                topic=self._events,
                partition=replayed.partition,
                offset=replayed.offset,
                timestamp_ms=event.time_ns // NS_PER_MS,
                key=node_key(event).encode(),
                value=encode(event),
            ),
            event,
        )
