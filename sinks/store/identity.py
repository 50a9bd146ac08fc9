"""Whether the topic that is read is the one of which the table has rows.

An offset means nothing without its topic: one that is deleted and made anew, or restored from
elsewhere, has the same name and other records. So beside the last offset of each partition the
table keeps which topic it is of, as a number. Pure: asks neither the table nor the brokers.
"""

import hashlib

from gpuledger.bus.protocol import TopicPartition
from gpuledger.errors import UserError

_REMEDY = (
    "nothing is written. See that what it holds is not stored already, then set store.generation"
    " to a new name to go on behind what is stored"
)


def number_of(topic_id: str) -> int:
    """Return the number under which the table keeps a topic's identity: 63 bits of its hash."""
    return int.from_bytes(hashlib.sha256(topic_id.encode()).digest()[:8]) >> 1


def is_same_topic(*, stored: int | None, topic_id: str | None) -> bool:
    """Return whether the table's offsets are those of the topic with this identity.

    Tables of before know of no identity, nor do brokers before Kafka 2.8; these are trusted.
    """
    return stored is None or topic_id is None or stored == number_of(topic_id)


def other_topic(partition: TopicPartition, *, last_offset: int, topic_id: str | None) -> UserError:
    """Return the error for a table whose offsets are another topic's."""
    return UserError(
        f"the store has {_shown(partition)} up to offset {last_offset} of another topic of that"
        f" name: it was made anew, or is another cluster's (its id is {topic_id} now); {_REMEDY}"
    )


def refuse_shorter_topic(partition: TopicPartition, *, last_offset: int, end: int) -> None:
    """Raise UserError where the partition ends before what the table has of it."""
    if last_offset + 1 > end:
        raise UserError(
            f"the store has {_shown(partition)} up to offset {last_offset}, but that partition ends"
            f" at {end}: the topic was made anew, is another cluster's, or lost records; {_REMEDY}"
        )


def _shown(partition: TopicPartition) -> str:
    return f"{partition.topic}[{partition.partition}]"
