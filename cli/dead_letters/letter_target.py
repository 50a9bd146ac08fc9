"""The contract of those to whom letters are put back.

A letter goes to the consumer that refused it and to nobody else.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from cli.dead_letters.letter_filter import KeptLetter
from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import decoder_of
from gpuledger.errors import UndecodableError
from gpuledger.topics import Topic
from sinks.redelivery import Refusals


class Usable(NamedTuple):
    """A letter's record as it was read then, and what it says."""

    record: Record
    value: Any
    """A record of its topic: one with `time_ns`."""


class LetterTarget(Protocol):
    """The consumer to whom letters are put back, or what it hands on to."""

    consumer: str
    """The consumer group whose letters it takes."""
    receiver: str
    """Where letters go, for people."""
    max_batch: int
    """The most letters of one delivery."""

    def take(self, letter: KeptLetter) -> Usable | str:
        """Return what can be delivered of a letter, or why nothing can; nothing is sent."""

    async def deliver(self, batch: Sequence[Usable]) -> Refusals:
        """Return once each record is taken or refused; raises as `Redelivery.deliver`."""


def usable(letter: KeptLetter, topics: Sequence[Topic]) -> Usable | str:
    """Return the record of a letter that is of one of these topics, or why there is none."""
    content = letter.content
    topic = next((each for each in topics if each.name == content.topic), None)
    if topic is None:
        return f"it is of a record of {content.topic}, which is not read there"
    if content.last_offset is not None:
        return "it stands for a batch that cannot be unpacked"
    if letter.value is None:
        return "it has no bytes: there were none, or more than a letter has room for"
    try:
        value = decoder_of(topic.name, topic.record).decode(letter.value)
    except UndecodableError as error:
        return f"it cannot be decoded by this version either: {error}"
    record = Record(
        topic=content.topic,
        partition=content.partition,
        offset=content.offset,
        # As whoever wrote it stamps it: the letter does not say what the record had.
        timestamp_ms=value.time_ns // NS_PER_MS,
        key=letter.key,
        value=letter.value,
    )
    return Usable(record, value)
