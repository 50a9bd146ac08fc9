"""The time that a bill is of, as people write it. Pure. All days and months are UTC's."""

import re
from datetime import UTC, datetime
from typing import Final

from gpuledger_reports.asked import AskedError
from gpuledger_reports.times import DAY_US, HOUR_US, Window

MAX_DAYS: Final = 3_660
"""Ten years, which a bill takes minutes of: what is longer is a mistake."""
_PERIOD: Final = re.compile(r"(?P<year>\d{4})(-(?P<month>\d\d)(-(?P<day>\d\d))?)?", re.ASCII)


def parse_period(text: str) -> Window:
    """Return the year, month or day that a text names; raises AskedError where it names none."""
    mistake = AskedError(
        "period", f"{text!r} is no period; give a month such as 2026-10, a day or a year"
    )
    # By the calendar, as months have no length.
    match = _PERIOD.fullmatch(text)
    if match is None:
        raise mistake
    year, month, day = (int(match[part] or 1) for part in ("year", "month", "day"))
    try:
        begin = datetime(year, month, day, tzinfo=UTC)
        next_month = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
        next_year = datetime(year + 1, 1, 1, tzinfo=UTC)
    except ValueError:
        raise mistake from None
    if match["day"]:
        return Window(_us(begin), _us(begin) + DAY_US)
    return Window(_us(begin), _us(next_month if match["month"] else next_year))


def window_of(begin_ms: int, end_ms: int) -> Window:
    """Return the window of two times; raises AskedError where they are no whole hours in order."""
    window = Window(begin_ms * 1000, end_ms * 1000)
    hours = "bills are of whole hours; give such as 2026-10-01T14:00:00Z"
    if window.begin_us % HOUR_US:
        raise AskedError("from", hours)
    if window.end_us % HOUR_US:
        raise AskedError("to", hours)
    if window.begin_us >= window.end_us:
        raise AskedError("to", "must be later than `from`")
    if window.end_us - window.begin_us > MAX_DAYS * DAY_US:
        raise AskedError("from", f"is more than {MAX_DAYS} days before `to`; give a shorter time")
    return window


def last_month(now_us: int) -> Window:
    """Return the month before the one that it is."""
    # At a month's begin `month_of` means the month that has just ended.
    return month_of(month_of(now_us + 1).begin_us)


def month_of(time_us: int) -> Window:
    """Return the month that a time is in, or that ends at it."""
    return parse_period(datetime.fromtimestamp((time_us - 1) // 10**6, tz=UTC).strftime("%Y-%m"))


def _us(moment: datetime) -> int:
    return int(moment.timestamp()) * 10**6
