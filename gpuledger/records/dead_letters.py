"""A record that could not be used, or a batch of them: where it lay, why, and its bytes.

Here lives the record of `gpuledger.dead-letters.v1`.
"""

from gpuledger.records.base import BaseRecord, Natural
from gpuledger.records.bounds import (
    Base64,
    Sentence,
    Word,
)


class DeadLetter(BaseRecord, frozen=True, kw_only=True):
    """A record that a consumer could not use, kept so that it can be looked at and sent again."""

    topic: Word
    """The topic from which it was read."""
    partition: Natural
    """Its partition there."""
    offset: Natural
    """Its offset there; of several records the first one's."""
    consumer: Sentence
    """The consumer group that could not use it."""
    reason: Word
    """Why, as one word: `undecodable`, `unreadable`, `invalid`, …"""
    detail: Sentence
    """Why, as a sentence that names field and value."""
    time_ns: Natural
    """When it was put aside, nanoseconds since the epoch."""
    key_base64: Base64 | None = None
    """The record's key; absent where it had none."""
    value_base64: Base64 | None = None
    """The record's bytes, unchanged; absent where it had none."""
    last_offset: Natural | None = None
    """The last one's offset, where the letter stands for all records of a batch that cannot be
    unpacked; absent where it stands for one record."""
