"""The rows of the table `gaps`: what was gone, or unreadable, before it could be stored, each once.

A gap is written before any row behind it. Its stream's number is the offset up to which gaps are
recorded, in the commit of the row itself: whoever finds the same gap again, after a crash or on
another machine, writes what is left of it. Pure: asks neither a table nor a clock.
"""

from typing import Any

from gpuledger.bus.protocol import Gap


def stream_of(stream: str, gap: Gap) -> str:
    """Return the stream of a gap: that of its partition, and of its kind."""
    return f"{stream}|{gap.reason.value}"


def recorded_up_to(gap: Gap) -> int:
    """Return the number that the gap's row leaves in its stream."""
    return gap.next_offset if gap.has_end else gap.first_offset


def row_of(
    gap: Gap,
    *,
    stored: int | None,
    recorded: int | None,
    topic_id: str | None,
    time_before_us: int | None,
    detected_us: int,
) -> tuple[Any, ...] | None:
    """Return the row of a gap, in the columns' order, or `None` where all of it is known.

    `stored` is the last offset that the table has, `recorded` the number of the gap's stream.
    """
    first = gap.first_offset if stored is None else max(gap.first_offset, stored + 1)
    if recorded is not None:
        if recorded >= recorded_up_to(gap):
            return None
        first = max(first, recorded) if gap.has_end else first
    next_offset = gap.next_offset if gap.has_end else None
    if next_offset is not None and first >= next_offset:
        return None
    return (
        *gap.partition,
        gap.reason.value,
        first,
        next_offset,
        None if next_offset is None else next_offset - first,
        time_before_us,
        None if gap.time_after_ms is None else gap.time_after_ms * 1000,
        detected_us,
        topic_id,
    )
