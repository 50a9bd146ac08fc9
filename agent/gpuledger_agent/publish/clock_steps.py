"""Corrects the times of messages that waited while the node's clock was set.

A bundle keeps the time at which the node booted, by the clock that gave the bundle its times. If
the present clock gives another time, the clock was set in between, because the node's time since
boot cannot be set. The present clock is then taken to be right: after a boot, a clock is wrong
until NTP sets it. Times of an earlier boot stay as they are, because its clock is unknown.

Small steps are left as they are. They do no harm, and a pause of a virtual machine looks like one.
"""

from typing import Any, Final

import msgspec

from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND

MIN_STEP_NS: Final = 10 * NS_PER_SECOND
_TIME: Final = "time_ns"


def step_between(before_ns: int | None, now_ns: int) -> int:
    """Return by how much the clock was set, in nanoseconds.

    The arguments are the time of the boot by the earlier clock and by the present clock. The result
    is a whole number of milliseconds, so that a message that is sent repeatedly gets the same time.
    It is 0 for steps below `MIN_STEP_NS`, and if `before_ns` is unknown.
    """
    step_ns = 0 if before_ns is None else now_ns - before_ns
    if abs(step_ns) < MIN_STEP_NS:
        return 0
    return round(step_ns / NS_PER_MS) * NS_PER_MS


def shift_times(message: Message, by_ns: int) -> Message:
    """Return a message with its timestamp and the times of its record shifted.

    Fields with times since the epoch are named `time_ns` or `…_time_ns`.
    """
    if message.value is None:
        return message
    value = msgspec.json.encode(_shifted(msgspec.json.decode(message.value), by_ns))
    timestamp_ms = max(0, message.timestamp_ms + by_ns // NS_PER_MS)
    return message._replace(value=value, timestamp_ms=timestamp_ms)


def _shifted(part: Any, by_ns: int) -> Any:  # noqa: ANN401  # any JSON
    if isinstance(part, list):
        return [_shifted(item, by_ns) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        name: max(0, item + by_ns)
        if isinstance(item, int) and (name == _TIME or name.endswith(f"_{_TIME}"))
        else _shifted(item, by_ns)
        for name, item in part.items()
    }
