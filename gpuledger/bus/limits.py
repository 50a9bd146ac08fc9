"""Size limits for messages and batches, the same on every bus."""

from collections.abc import Iterable
from typing import Final

from gpuledger import topics
from gpuledger.bus.protocol import Message
from gpuledger.errors import MessageTooLargeError

# Counted before compression, because a batch's compressed size is unknown while it is filled.
MAX_BATCH_BYTES: Final = 1_000_000
"""Maximum number of uncompressed bytes in one batch; below the brokers' default
`message.max.bytes` of 1,048,588."""
OVERHEAD_BYTES: Final = 128
"""Upper bound on the bytes that Kafka's format adds to key and value in a one-record batch."""
MAX_BATCH_RECORDS: Final = 20_000
"""Maximum number of records in one batch. The smallest common records are tombstones with a pod UID
as key (46 bytes); a batch of them reaches this limit and `MAX_BATCH_BYTES` together. Tombstones of
nodes with very short names are smaller; records above the limit go into the next batch. Without a
limit, 900,000 empty records fit in a 727 kB batch."""
MAX_MESSAGE_BYTES: Final = MAX_BATCH_BYTES - OVERHEAD_BYTES
TOPIC_MESSAGE_BYTES: Final = topics.MAX_MESSAGE_BYTES
"""`max.message.bytes` of gpuledger's topics, which limits a compressed batch."""
_RATIO: Final = 8
"""Maximum unpacked bytes per compressed byte. gpuledger's own batches stay below
`MAX_BATCH_BYTES`, but other clients may fill batches by compressed size, and ticks compress to a
fifth."""
MAX_UNPACKED_BYTES: Final = _RATIO * TOPIC_MESSAGE_BYTES
"""Maximum number of unpacked bytes in one batch. Without this limit, a few kilobytes of zstd could
expand to a gigabyte of zeros."""

MAX_RECORD_HEADERS: Final = 32
"""Maximum number of headers of one record. gpuledger writes none, and tracing or mirroring clients
add a few. A 342-byte batch can hold 4,000,000 empty headers, which take a second and 285 MiB to
read."""
MAX_TURN_BYTES: Final = 4 << 20
"""Maximum number of bytes that consumers fetch and unpack before the event loop runs other tasks.

One batch may exceed the limit. A poll of 500 ticks with 8 GPUs (7.3 kB each) fits. The join puts
the records that a poll returns from a partition into one transaction; with a quarter of this limit,
the join processed a tenth fewer ticks per second. The worst possible content takes 0.4 s to read:
batches of empty headers take 40 ms per megabyte, and the batch above the limit takes 0.2 s."""


def size_bytes(key: bytes | None, value: bytes | None) -> int:
    """Return the number of bytes of a message that count against `MAX_MESSAGE_BYTES`."""
    return len(key or b"") + len(value or b"")


def refuse_too_large(topic: str, messages: Iterable[Message]) -> None:
    """Raise `MessageTooLargeError` if a message is larger than `MAX_MESSAGE_BYTES`."""
    # Checked before anything is sent, because a broker rejects the whole batch.
    for message in messages:
        size = size_bytes(message.key, message.value)
        if size > MAX_MESSAGE_BYTES:
            key = (message.key or b"")[:80].decode(errors="replace")
            raise MessageTooLargeError(
                f"{topic}: message with key {key!r} is too large: {size} bytes, "
                f"maximum {MAX_MESSAGE_BYTES}; no message of its batch was published"
            )
