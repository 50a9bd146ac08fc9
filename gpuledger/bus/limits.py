"""How large a message may be on any bus, so that one bus refuses what the other would."""

from collections.abc import Iterable
from typing import Final

from gpuledger.bus.protocol import Message
from gpuledger.errors import MessageTooLargeError

MAX_BATCH_BYTES: Final = 1_000_000
"""Uncompressed bytes in one batch; below the brokers' default `message.max.bytes` of 1,048,588."""
OVERHEAD_BYTES: Final = 128
"""More than what Kafka's format adds to a batch of one record beside its key and its value."""
MAX_MESSAGE_BYTES: Final = MAX_BATCH_BYTES - OVERHEAD_BYTES


def refuse_too_large(topic: str, messages: Iterable[Message]) -> None:
    """Raise `MessageTooLargeError` where one message has more bytes than a batch may have."""
    for message in messages:
        size_bytes = len(message.key or b"") + len(message.value or b"")
        if size_bytes > MAX_MESSAGE_BYTES:
            key = (message.key or b"")[:80].decode(errors="replace")
            raise MessageTooLargeError(
                f"{topic}: the message with key {key!r} has {size_bytes} bytes, "
                f"and the bus takes at most {MAX_MESSAGE_BYTES}; nothing of its batch was published"
            )
