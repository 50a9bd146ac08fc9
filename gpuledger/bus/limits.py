"""How large a message may be on any bus, so that one bus refuses what the other would."""

from collections.abc import Iterable
from typing import Final

from gpuledger import topics
from gpuledger.bus.protocol import Message
from gpuledger.errors import MessageTooLargeError

# Before packing, which comes later: what a batch packs to is not known while it is filled.
MAX_BATCH_BYTES: Final = 1_000_000
"""Uncompressed bytes in one batch; below the brokers' default `message.max.bytes` of 1,048,588."""
OVERHEAD_BYTES: Final = 128
"""More than what Kafka's format adds to a batch of one record beside its key and its value."""
MAX_BATCH_RECORDS: Final = 20_000
"""Records in one batch. Of the smallest that are written in numbers, tombstones of pods under their
UIDs (46 bytes in all), as many fit in `MAX_BATCH_BYTES`; of those of nodes with the shortest names
more would, and go into another one. With nothing in them a batch of 727 kB holds 900,000."""
MAX_MESSAGE_BYTES: Final = MAX_BATCH_BYTES - OVERHEAD_BYTES
TOPIC_MESSAGE_BYTES: Final = topics.MAX_MESSAGE_BYTES
"""`max.message.bytes` of our topics, which bounds a batch as it is packed."""
_RATIO: Final = 8
"""What may be in a batch for each byte that a broker takes. Ours hold `MAX_BATCH_BYTES` at most;
other clients may count packed bytes, and ticks together pack to a fifth."""
MAX_UNPACKED_BYTES: Final = _RATIO * TOPIC_MESSAGE_BYTES
"""Bytes of a batch that is unpacked: a few kilobytes of zstd may be a gigabyte of zeros."""

MAX_RECORD_HEADERS: Final = 32
"""Headers of one record. Ours have none, and clients that trace or copy add a few; with nothing in
them a batch of 342 bytes holds 4,000,000, which take a second and 285 MiB to read."""
MAX_TURN_BYTES: Final = 4 << 20
"""Bytes that are fetched and unpacked between two turns of the event loop, and one batch more.

A poll's 500 ticks of 8 GPUs, 7.3 kB each, fit: the join makes a transaction of what a poll brings
of a partition, and with a quarter of it made a tenth fewer ticks a second. What anybody may put
into it takes 0.4 s to read: batches of empty headers 40 ms a megabyte, the one batch more 0.2 s."""


def size_bytes(key: bytes | None, value: bytes | None) -> int:
    """Return what counts of a message against `MAX_MESSAGE_BYTES`."""
    return len(key or b"") + len(value or b"")


def refuse_too_large(topic: str, messages: Iterable[Message]) -> None:
    """Raise `MessageTooLargeError` where one message has more bytes than a batch may have."""
    # Before anything is sent: a broker refuses a batch as a whole, and its records with it.
    for message in messages:
        size = size_bytes(message.key, message.value)
        if size > MAX_MESSAGE_BYTES:
            key = (message.key or b"")[:80].decode(errors="replace")
            raise MessageTooLargeError(
                f"{topic}: the message with key {key!r} has {size} bytes, "
                f"and the bus takes at most {MAX_MESSAGE_BYTES}; nothing of its batch was published"
            )
