"""Days and hours of UTC, in microseconds since the epoch. Pure."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Final, NamedTuple

from gpuledger.time_ranges import write_moment

HOUR_US: Final = 3_600_000_000
DAY_US: Final = 24 * HOUR_US
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Window(NamedTuple):
    """A time range of whole hours, in microseconds since the epoch; the end is excluded."""

    begin_us: int
    end_us: int


def day_of(time_us: int) -> date:
    """Return the UTC day of a time."""
    return (_EPOCH + timedelta(microseconds=time_us)).date()


def begin_of(day: date) -> int:
    """Return the start of a UTC day, in microseconds since the epoch."""
    return (datetime(day.year, day.month, day.day, tzinfo=UTC) - _EPOCH).days * DAY_US


def days_in(window: Window) -> Iterator[Window]:
    """Yield each UTC day of a window; the first and last may be partial."""
    for number in range(window.begin_us // DAY_US, -(-window.end_us // DAY_US)):
        begin_us = max(window.begin_us, number * DAY_US)
        yield Window(begin_us, min(window.end_us, (number + 1) * DAY_US))


def time_text(time_us: int) -> str:
    """Return a time in microseconds as text, such as 2026-10-01T00:00:00Z."""
    return write_moment(time_us // 10**6 * 1000)
