"""Makes the Kafka messages of one event, for sinks that write to Kafka. Pure."""

from collections.abc import Callable, Sequence

from gpuledger.bus.limits import refuse_too_large
from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.errors import MessageTooLargeError
from gpuledger.keys import node_key
from gpuledger.records import GpuEvent

ValuesOf = Callable[[GpuEvent], Sequence[bytes]]
"""Returns the values of an event's messages; raises ValueError if the event is invalid."""


class UnfitError(Exception):
    """No valid message can be made from an event; `reason` is one word, the message a sentence."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def messages_of(
    event: GpuEvent, *, values_of: ValuesOf, topic: str, newest_ns: int
) -> list[Message]:
    """Return the messages of an event.

    Raises UnfitError if the event is later than `newest_ns` or invalid, or if a message is too
    large.
    """
    if event.time_ns > newest_ns:
        seconds = (event.time_ns - newest_ns) / NS_PER_SECOND
        raise UnfitError(
            f"time_ns: {event.time_ns} is {seconds:.0f} s beyond the allowed future",
            reason="future",
        )
    key, timestamp_ms = node_key(event).encode(), event.time_ns // NS_PER_MS
    try:
        messages = [
            Message(key=key, value=value, timestamp_ms=timestamp_ms) for value in values_of(event)
        ]
        refuse_too_large(topic, messages)
    except ValueError as error:
        raise UnfitError(str(error), reason="invalid") from error
    except MessageTooLargeError as error:
        # Otherwise the broker would reject the whole transaction, again and again.
        raise UnfitError(str(error), reason="too_large") from error
    return messages
