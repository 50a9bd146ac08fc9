"""Replays selected dead letters, or counts them.

A record that the join rejected is written back to its own topic. Only the join consumes this topic.
The join skips ticks that it has already booked, and rejects invalid records again. An event that a
sink rejected is written to the replay topic, with the name of this sink's consumer group; all other
sinks skip it. Both are written to the partition of the record's node.

A dead letter may be replayed several times, because its consumer recognizes repeated records or is
idempotent. An event that is rejected again has several dead letters; only the first is replayed.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, NamedTuple

from gpuledger.bus.protocol import Bus, Message, Producer, TopicPartition
from gpuledger.clock import NS_PER_MS, Clock
from gpuledger.codec import decoder_of, encode
from gpuledger.errors import UndecodableError
from gpuledger.keys import split_key
from gpuledger.records import GpuEvent, ReplayedEvent
from gpuledger.texts import readable, shorten
from gpuledger.topics import Topics, agreed_partitions, partition_of_node
from gpuledger_cli.dead_letters.dead_letter_log import (
    DeadLetterFilter,
    DeadLetterLog,
    StoredDeadLetter,
)
from gpuledger_cli.dead_letters.dead_letter_printing import open_log
from gpuledger_cli.long_work import printing_progress
from gpuledger_sinks.registry import KINDS

ALL_WRITTEN: Final = 0
LEFT_OUT: Final = 3
_MAX_BATCH: Final = 100
_MAX_BATCH_BYTES: Final = 1 << 20
_REASON_CHARACTERS: Final = 200
_MAX_REASONS: Final = 1000


class Replayable(NamedTuple):
    """The message that replays a dead letter."""

    topic: str
    node: str
    """The node key that selects the partition."""
    message: Message


class _UnfitError(Exception):
    """A dead letter that cannot be replayed; the message gives the reason."""


def replayable(dead_letter: StoredDeadLetter, topics: Topics, *, now_ms: int) -> Replayable | str:
    """Return the message that replays a dead letter, or a text on why it cannot be replayed."""
    try:
        return _replayable(dead_letter, topics, now_ms=now_ms)
    except (_UnfitError, UndecodableError) as error:
        return str(error)


def _replayable(dead_letter: StoredDeadLetter, topics: Topics, *, now_ms: int) -> Replayable:
    content = dead_letter.content
    taken = {each.name: each for each in (topics.samples, topics.processes, topics.incidents)}
    taken[topics.events.name] = topics.events
    if (topic := taken.get(content.topic)) is None:
        raise _UnfitError(f"records of {content.topic} are not replayed")
    if content.consumer in _groups_without_replays(topics):
        raise _UnfitError(f"{content.consumer} takes no replays")
    node = (dead_letter.key or b"").decode(errors="replace")
    if dead_letter.value is None or not split_key(node)[1]:
        raise _UnfitError("it has no bytes, or its key is not a node key")
    value = decoder_of(topic.name, topic.record).decode(dead_letter.value)
    if node != topic.key_of(value):
        raise _UnfitError("its key is the key of another node")
    if not isinstance(value, GpuEvent):
        message = Message(dead_letter.key, dead_letter.value, value.time_ns // NS_PER_MS)
        return Replayable(topic.name, node, message)
    replayed = ReplayedEvent(
        consumer=content.consumer,
        partition=content.partition,
        offset=content.offset,
        event=value,
    )
    # The time is now, so that the replay topic's retention begins now.
    return Replayable(topics.replay.name, node, Message(dead_letter.key, encode(replayed), now_ms))


def _groups_without_replays(topics: Topics) -> set[str]:
    return {topics.group(kind.group) for kind in KINDS.values() if not kind.takes_replays}


class DeadLetterReplay:
    """Writes the messages that replay dead letters, in a batch for each partition."""

    def __init__(self, producer: Producer | None, *, topics: Topics, partitions: int) -> None:
        """Take the producer; without one, messages are only counted."""
        self._producer, self._topics, self._partitions = producer, topics, partitions
        self._batches: dict[TopicPartition, list[Message]] = {}
        self._count = self._bytes = 0
        self._seen: set[tuple[str, str, int, int]] = set()
        self.written: Counter[str] = Counter()
        """Number of replayed dead letters by the consumer group that rejected them."""
        self.left_out: Counter[str] = Counter()
        """Number of dead letters that cannot be replayed, by reason."""

    async def add(self, dead_letter: StoredDeadLetter, *, now_ms: int) -> None:
        """Add a dead letter to the batch of its partition; write all batches if they are large.

        Only the first dead letter of a record and consumer is replayed; the others are ignored.
        """
        content = dead_letter.content
        identity = (content.consumer, content.topic, content.partition, content.offset)
        if identity in self._seen:
            return
        self._seen.add(identity)
        found = replayable(dead_letter, self._topics, now_ms=now_ms)
        if isinstance(found, str):
            self.leave_out(found)
            return
        topic, node, message = found
        at = TopicPartition(topic, partition_of_node(node, partitions=self._partitions))
        self._batches.setdefault(at, []).append(message)
        self.written[readable(content.consumer)] += 1
        self._count += 1
        self._bytes += len(message.value or b"")
        if self._count >= _MAX_BATCH or self._bytes >= _MAX_BATCH_BYTES:
            await self.flush()

    def leave_out(self, why: str) -> None:
        """Count a dead letter that cannot be replayed."""
        why = shorten(readable(why), _REASON_CHARACTERS)
        # Reasons quote records, so there may be as many reasons as dead letters.
        is_kept = why in self.left_out or len(self.left_out) < _MAX_REASONS
        self.left_out[why if is_kept else "other reasons"] += 1

    async def flush(self) -> None:
        """Write the messages added since the last flush."""
        batches, self._batches = self._batches, {}
        self._count = self._bytes = 0
        if self._producer is not None:
            for at, messages in batches.items():
                await self._producer.publish(*at, messages)


async def replay_dead_letters(
    bus: Bus, wanted: DeadLetterFilter, *, is_rehearsal: bool, clock: Clock
) -> int:
    """Replay or count the matching dead letters, and print the counts.

    Return the exit code: 3 if some of them cannot be replayed, otherwise 0.
    """
    async with bus.producer() as producer:
        replaying = DeadLetterReplay(
            None if is_rehearsal else producer,
            topics=bus.topics,
            partitions=await _count_partitions(bus),
        )
        async with open_log(bus, wanted) as log:
            with printing_progress(log.offsets, what="dead-letter records", done="read") as advance:
                await _replay(log, replaying, advance, clock=clock)
    for position in sorted(log.missing):
        replaying.leave_out(f"no dead-letter record at {position}")
    _print_counts(replaying, log, is_rehearsal=is_rehearsal)
    return LEFT_OUT if replaying.left_out else ALL_WRITTEN


async def _count_partitions(bus: Bus) -> int:
    """Return the number of partitions of all topics that replays are written to.

    Raise `TopicsError` if the numbers differ.
    """
    topics = bus.topics
    written = (topics.samples, topics.processes, topics.incidents, topics.replay)
    return agreed_partitions({topic.name: await bus.partitions(topic.name) for topic in written})


async def _replay(
    log: DeadLetterLog, replaying: DeadLetterReplay, advance: Callable[[int], None], *, clock: Clock
) -> None:
    async with aclosing(log.dead_letters(advance)) as dead_letters:
        async for dead_letter in dead_letters:
            await replaying.add(dead_letter, now_ms=clock.time_ns() // NS_PER_MS)
    await replaying.flush()


def _print_counts(replaying: DeadLetterReplay, log: DeadLetterLog, *, is_rehearsal: bool) -> None:
    done = "would be replayed" if is_rehearsal else "replayed"
    for why, count in replaying.left_out.most_common():
        sys.stdout.write(f"{count} cannot be replayed: {why}\n")
    for consumer, count in sorted(replaying.written.items()):
        sys.stdout.write(f"{count} {done} to {consumer}\n")
    if not replaying.written and not replaying.left_out:
        sys.stdout.write(f"{log.why_none()}\n")
    elif is_rehearsal and replaying.written:
        sys.stdout.write("nothing was sent; add --yes to send\n")
