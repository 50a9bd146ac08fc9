"""Of which days rows are stored: as far back as ticks come late, as far ahead as clocks are.

Each day is a folder with files of its own, and a tick's time is its writer's word: days that are
made up would each cost a file for a row. Held against this machine's clock, as every other time,
Kafka's timestamp included, is the writer's too. Pure.
"""

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

_DAY_NS: Final = 86_400 * 10**9
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Refusal(NamedTuple):
    """Why an event is not stored."""

    reason: str
    """In a word."""
    detail: str
    """In a sentence."""


class DayWindow(NamedTuple):
    """The days of which rows are stored."""

    max_age_seconds: float
    max_future_seconds: float

    def refusal_of(self, days: Collection[int], *, now_ns: int) -> Refusal | None:
        """Return why an event is not stored of which there are rows of these days since 1970."""
        if not days:
            return None
        first, last = min(days), max(days)
        if last > (now_ns + round(self.max_future_seconds * 1e9)) // _DAY_NS:
            setting = f"store.max_future_seconds is {self.max_future_seconds:.0f}"
            return Refusal("future", f"time_ns is of {_shown(last)}, too far ahead: {setting}")
        if first < (now_ns - round(self.max_age_seconds * 1e9)) // _DAY_NS:
            setting = f"store.max_age_seconds is {self.max_age_seconds:.0f}"
            return Refusal("too_old", f"time_ns is of {_shown(first)}, too long ago: {setting}")
        return None


def _shown(day: int) -> str:
    try:
        return (_EPOCH + timedelta(days=day)).date().isoformat()
    except OverflowError:
        return f"{day} days after 1970"
